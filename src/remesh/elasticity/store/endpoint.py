"""Endpoints as users write them (HOST[:PORT]), and whether they are loopback."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "head")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def join_endpoint(host: str, port: int) -> str:
    """``host:port``, with the brackets that an IPv6 address needs.

    >>> join_endpoint("head", 29400), join_endpoint("::1", 29400)
    ('head:29400', '[::1]:29400')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port.

    >>> split_endpoint("[::1]:29400")
    ('::1', 29400)
    """
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)
