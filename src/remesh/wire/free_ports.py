"""Free port numbers for servers that start a moment later, in another process.

The kernel gives a client any port of its own range; a client that asks for a server before it listens may even be given
that server's port, and be connected to itself. So the ports here lie below that range, and are drawn at random, since
other processes may ask at the same moment.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from remesh.foundation.errors import ConfigError

_CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
"""Most services that have a port by name lie below."""
_FEWEST = 1_000
_TRIES = 100
_CHANCE = random.SystemRandom()
"""Programs seed the other one, and alike on all ranks."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this machine on which no process listens now. Raises `ConfigError` when none is found."""
    ports = server_ports()
    for _ in range(_TRIES):
        try:
            with socket.create_server((host, _CHANCE.choice(ports) if ports else 0)) as probe:
                return int(probe.getsockname()[1])
        except OSError as raised:
            if raised.errno != errno.EADDRINUSE:
                raise
    raise ConfigError(
        f"looking for a free port of {host}: {_TRIES} from {ports[0]} to {ports[-1]} are in use; stop a program that "
        "listens there"
    )


def server_ports() -> range:
    """Ports that the kernel gives to no client; none where the machine leaves fewer than a thousand of them."""
    try:
        first = int(_CLIENTS.read_text().split()[0])
    except OSError:  # not Linux
        return range(0)
    return range(_LOWEST, first) if first - _LOWEST >= _FEWEST else range(0)
