"""Listening sockets: one that is bound to an address, and a probe whether a process listens at another.

A probe asks nothing of a process that listens. *Refused* is to prove that there is none any more: the kernel of a host
resets a connection to a port that no process has. A firewall that rejects connections answers by ICMP, which proves
nothing; the socket's queue of errors separates the two. (A firewall that rejects by a reset, as ``iptables -j REJECT
--reject-with tcp-reset`` does, looks the same as the host.)
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Final

from remesh.foundation.settings import timeout_s

PROBE_TIMEOUT_S = timeout_s(0.2)
_IP_RECVERR: Final = 11
_IPV6_RECVERR: Final = 25
_FROM_NETWORK: Final = (2, 3)
"""Origins of an error that a message of ICMP or ICMPv6 has brought (linux/errqueue.h)."""
_EXTENDED_ERROR: Final = struct.Struct("=IB")
"""The error's number, and its origin: the head of ``struct sock_extended_err``."""
_MAX_BYTES: Final = 512


def listen_at(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at an address of this machine, IPv4 or IPv6; OSError where the port is taken."""
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def is_listening(address: str, port: int, limit_s: float = PROBE_TIMEOUT_S) -> bool | None:
    """Whether a port accepts a connection; False when the host refuses it, None when nothing or a firewall answers."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    answers = [_probe(family, where, limit_s) for family, _, _, _, where in found]
    if True in answers:
        return True
    return None if None in answers else False


def _probe(family: int, where: tuple[object, ...], limit_s: float) -> bool | None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(limit_s)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
        else:
            probe.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        try:
            probe.connect(where)
        except ConnectionRefusedError:
            return None if _is_from_network(probe) else False
        except OSError:
            return None
    return True


def _is_from_network(probe: socket.socket) -> bool:
    """Whether the last error of a connection came by ICMP."""
    probe.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        _, notes, _, _ = probe.recvmsg(0, _MAX_BYTES, socket.MSG_ERRQUEUE)
        return any(_EXTENDED_ERROR.unpack_from(data)[1] in _FROM_NETWORK for _, _, data in notes)
    return False
