"""Hosts of a job's run: this host, hosts made here (a testbed), or real ones, and the leader's address for each.

                    ranks connect to                 clients connect to
this host           the loopback                     the same
a testbed's hosts   its switch                       the loopback
other hosts         this host by its name            the same
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from remesh import testbed
from remesh.carried.hosts.host_list import Host, is_loopback
from remesh.foundation.errors import ConfigError
from remesh.foundation.threads import make_thread
from remesh.testbed.inside import HostEntry

_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Entrance:
    """A socket that listens, and the address by which it is called."""

    socket: socket.socket
    address: tuple[str, int]


@dataclass(frozen=True, slots=True)
class JobHosts:
    """The hosts of one run of a job."""

    hosts: tuple[Host, ...]
    """The hosts; empty for this one."""
    bed: testbed.Testbed | None
    """The testbed of the hosts, if they were made here; it is started."""

    @property
    def entry(self) -> HostEntry | None:
        """The switch from which all hosts of a testbed can be reached; None without a testbed."""
        return None if self.bed is None else self.bed.switch_entry

    def listen(self) -> Entrance:
        """Open a server that ranks connect to."""
        if self.bed is not None:
            made = _listen_inside(self.bed.switch_entry, self.bed.switch_address)
            return Entrance(made, made.getsockname()[:2])
        if all(is_loopback(host.name) for host in self.hosts):
            return _listen_here()
        made = _listen("")
        return Entrance(made, (socket.gethostname(), made.getsockname()[1]))

    def listen_for_clients(self, ranks: Entrance) -> Entrance:
        """Open a server for users, on this machine and from real hosts; return that of the ranks if it serves both."""
        return ranks if self.bed is None else _listen_here()


def make_testbed(hosts: Sequence[Host], rate: str) -> testbed.Testbed:
    """Make hosts on this machine with links of this rate, not yet started; `ConfigError` if none is named."""
    if not hosts:
        raise ConfigError("making hosts on this machine: none was named; give --hosts a,b with --testbed")
    bytes_per_s = testbed.parse_rate(rate)
    return testbed.Testbed(testbed.BedSpec(tuple(testbed.HostSpec(host.name, bytes_per_s) for host in hosts)))


def _listen_here() -> Entrance:
    made = _listen(_LOOPBACK)
    return Entrance(made, made.getsockname()[:2])


def _listen(host: str) -> socket.socket:
    listener = socket.create_server((host, 0), backlog=1024)
    listener.set_inheritable(False)
    return listener


def _listen_inside(entry: HostEntry, address: str) -> socket.socket:
    """Make a socket of the testbed's switch: a socket belongs to the network of the thread that makes it."""
    made: list[socket.socket] = []

    def enter_and_listen() -> None:
        entry.enter()
        made.append(_listen(address))

    thread = make_thread("listen", enter_and_listen, daemon=False)
    thread.start()
    thread.join()
    if not made:
        raise ConfigError("listening on the testbed's switch: it could not be entered; see the message above")
    return made[0]
