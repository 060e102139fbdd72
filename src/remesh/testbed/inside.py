"""Entry of a process into a host of a testbed: it changes its network, host name and ``/etc/hosts``.

This happens early in its life.

Files, memory and process ids stay those of the machine. Threads that run already stay outside, so a process enters
before anything starts one.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from remesh.foundation.errors import ConfigError
from remesh.foundation.linux import calls
from remesh.testbed.commands import NIC
from remesh.testbed.network_namespaces import FOLDER

_NIC_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""The variables by which the libraries under torch get the interface of the network."""


@dataclass(frozen=True, slots=True)
class HostEntry:
    """All that is needed to enter a host."""

    namespace: str
    host: str
    hosts_file: str
    """A file with the names and addresses of all hosts."""

    def enter(self) -> None:
        """Move this thread, and all it will start, into the host; `ConfigError` when there is no such host."""
        try:
            descriptor = os.open(FOLDER / self.namespace, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"entering host {self.host!r}: its namespace {self.namespace} is gone; start the testbed again"
            ) from error
        try:
            _enter(descriptor, self.hosts_file)
        except OSError as error:
            raise ConfigError(
                f"entering host {self.host!r}: {error.strerror}; this needs root, and the right to change namespaces"
            ) from error
        finally:
            os.close(descriptor)
        socket.sethostname(self.host)
        os.environ.update(dict.fromkeys(_NIC_VARIABLES, NIC))


def command_inside(entry: HostEntry, command: Sequence[str]) -> list[str]:
    """The command that runs ``command`` in a host, keeping the id of the process that is started."""
    return [sys.executable, "-m", "remesh.testbed.enter", entry.namespace, entry.host, entry.hosts_file, *command]


def _enter(network: int, hosts_file: str) -> None:
    calls.setns(network, calls.NEW_NETWORK)
    calls.unshare(calls.NEW_HOST_NAME | calls.NEW_MOUNTS)
    # What is mounted from here on must not show on the machine.
    calls.mount("none", "/", None, calls.MS_REC | calls.MS_SLAVE)
    # Libraries such as UCX look for network interfaces there, and would find those of the machine.
    calls.mount("sysfs", "/sys", "sysfs", 0)
    if os.path.exists("/etc/hosts"):
        calls.mount(hosts_file, "/etc/hosts", None, calls.MS_BIND)
