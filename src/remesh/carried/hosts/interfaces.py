"""Network interface of a host's ranks: the one that leads to another host."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from typing import Final

from remesh.carried.hosts.host_list import Host, RankSlot
from remesh.foundation.errors import ConfigError

_LOOPBACK: Final = "lo"
_GET_ADDRESS: Final = 0x8915
"""The ioctl SIOCGIFADDR."""
_REQUEST: Final = struct.Struct("16s24x")
_ADDRESS_AT: Final = slice(20, 24)
_ANY_PORT: Final = 9


def choose_interface(asked: str, hosts: Sequence[Host], slot: RankSlot) -> str:
    """Choose the interface of a rank: one that was ``asked`` for, else the one that leads to another host of the job.

    Several may be asked for, separated by commas. Raises `ConfigError` where one is missing on this host, or no way
    leads to the others.
    """
    if asked:
        here = [name for _, name in socket.if_nameindex()]
        if missing := [name for name in asked.split(",") if name not in here]:
            raise ConfigError(
                f"choosing the network interface of rank {slot.rank}: host {slot.host} has no {', '.join(missing)}, "
                f"expected one of {', '.join(here)}; name one with --interface"
            )
        return asked
    other = next((host.name for host in hosts if host.name != slot.host), None)
    return _LOOPBACK if other is None else find_interface(other)


def find_interface(host: str) -> str:
    """Find the interface through which this host reaches another one; `ConfigError` if there is none."""
    doing = f"looking for the network interface that leads to {host}"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))  # sends nothing
            address = probe.getsockname()[0]
            found = [name for _, name in socket.if_nameindex() if _address_of(probe, name) == address]
    except OSError as error:
        raise ConfigError(f"{doing}: {error}; name one with --interface") from error
    if not found and address.startswith("127."):
        return _LOOPBACK
    if not found:
        raise ConfigError(f"{doing}: none has the address {address}; name one with --interface")
    return found[0]


def _address_of(probe: socket.socket, name: str) -> str:
    """IPv4 address of an interface; "" if it has none."""
    try:
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, _REQUEST.pack(name.encode()))
    except OSError:
        return ""
    return socket.inet_ntoa(answer[_ADDRESS_AT])
