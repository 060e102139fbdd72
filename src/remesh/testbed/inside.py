"""How does a process get into a host? It changes its network, its host name and its ``/etc/hosts``, early in its life.

Files, memory and process ids stay those of the machine. Threads that run already stay outside, so a process enters
before anything starts one.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from remesh.errors import ConfigError
from remesh.testbed.commands import NIC
from remesh.testbed.namespaces import FOLDER

# Python 3.12 has `os.setns` and `os.unshare`; the numbers are those of sched.h and mount.h.
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_SLAVE = 0x80000
_NIC_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""How the libraries under torch are told which interface is the network."""


@dataclass(frozen=True, slots=True)
class Door:
    """All that is needed to enter a host."""

    namespace: str
    host: str
    hosts_file: str
    """A file with the names and addresses of all hosts."""


def enter_host(door: Door) -> None:
    """Move this thread, and all it will start, into a host; `ConfigError` when there is no such host."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        descriptor = os.open(FOLDER / door.namespace, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"entering host {door.host!r}: its namespace {door.namespace} is gone; start the testbed again"
        ) from error
    try:
        _check(libc.setns(descriptor, _CLONE_NEWNET), door)
    finally:
        os.close(descriptor)
    _check(libc.unshare(_CLONE_NEWUTS | _CLONE_NEWNS), door)
    # What is mounted from here on must not show on the machine.
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None), door)
    # Libraries such as UCX look for network interfaces there, and would find those of the machine.
    _check(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), door)
    if os.path.exists("/etc/hosts"):
        _check(libc.mount(door.hosts_file.encode(), b"/etc/hosts", None, _MS_BIND, None), door)
    socket.sethostname(door.host)
    os.environ.update(dict.fromkeys(_NIC_VARIABLES, NIC))


def command_inside(door: Door, command: Sequence[str]) -> list[str]:
    """The command that runs ``command`` in a host, keeping the id of the process that is started."""
    return [sys.executable, "-m", "remesh.testbed.enter", door.namespace, door.host, door.hosts_file, *command]


def _check(result: int, door: Door) -> None:
    if result:
        error = ctypes.get_errno()
        raise ConfigError(
            f"entering host {door.host!r}: {os.strerror(error)}; this needs root, and the right to change namespaces"
        )
