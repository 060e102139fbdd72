"""Finder of gloo's sockets in this process, from the epoll sets of its threads.

gloo does not expose its sockets, and those that appear while groups are made may be the program's: a thread that talks
to a database opens some whenever it likes. But each of gloo's devices has a thread of a known name, which sits in
``epoll_wait``; the kernel shows on which descriptor, and which sockets that one watches:

    /proc/self/task/<tid>/comm        gloo_tcp_loop
    /proc/self/task/<tid>/syscall     232 0x16 ...          the first argument: descriptor 22
    /proc/self/fdinfo/22              tfd: 23 ...           a socket that it waits for
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass

Socket = tuple[int, int]
"""Descriptor and inode, so that a descriptor that was used again since is recognized."""

_LOOP_NAMES = ("gloo_tcp_loop", "gloo_tls_loop")
_WATCHED = re.compile(r"^tfd:\s+(\d+)", re.MULTILINE)
_NUM_LOOKS = 5000
_POLL_S = 2e-4
"""A loop that handles an event is back in its call soon; on a busy machine, within the second that this makes."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The sockets and threads that existed before groups were made."""

    sockets: frozenset[Socket]
    threads: frozenset[str]
    """All of this process; names are read only of new ones, which is faster."""


def open_sockets() -> frozenset[Socket]:
    """Every socket of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        target = _target(name)
        if target.startswith("socket:["):
            found.add((int(name), int(target[8:-1])))
    return frozenset(found)


def look_around() -> Surroundings:
    """The sockets and threads that exist now."""
    return Surroundings(open_sockets(), _threads())


def gloo_loops() -> frozenset[str]:
    """The threads of gloo's event loops."""
    return _loops_among(_threads())


def pick_gloos(sockets: frozenset[Socket], before: Surroundings) -> frozenset[Socket]:
    """The new sockets that belong to gloo; all new sockets if the kernel does not show what its event loops wait on.

    Loops that were there before are those of groups that were dropped, and may be on their way out. Where there is no
    new one, gloo has no socket yet.
    """
    sockets -= before.sockets
    loops = _loops_among(_threads() - before.threads)
    watched: set[int] = set()
    for loop in loops:
        descriptor = _descriptor_of(loop)
        if descriptor is None:
            return sockets
        with contextlib.suppress(OSError):
            watched |= {int(one) for one in _WATCHED.findall(_read(f"/proc/self/fdinfo/{descriptor}"))}
    return frozenset(one for one in sockets if one[0] in watched)


def descriptors_of_loops() -> frozenset[int]:
    """The descriptors that gloo's event loops wait on, and all that those watch: sockets, listeners, pipes."""
    found = set()
    for loop in gloo_loops():
        if (descriptor := _descriptor_of(loop)) is not None:
            with contextlib.suppress(OSError):
                text = _read(f"/proc/self/fdinfo/{descriptor}")
                found |= {descriptor, *(int(one) for one in _WATCHED.findall(text))}
    return frozenset(found)


def cut_connections(sockets: Iterable[Socket]) -> None:
    """Make every operation on them end with an error; not of those that listen, or took a descriptor since."""
    for descriptor, _ in open_sockets().intersection(sockets):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as alias:
            # gloo aborts the process when accept() on its listening socket fails.
            if not alias.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                alias.shutdown(socket.SHUT_RDWR)


def _threads() -> frozenset[str]:
    return frozenset(os.listdir("/proc/self/task"))


def _loops_among(threads: Iterable[str]) -> frozenset[str]:
    """The threads that are event loops of gloo."""
    found = set()
    for thread in threads:
        with contextlib.suppress(OSError):
            if _read(f"/proc/self/task/{thread}/comm").strip() in _LOOP_NAMES:
                found.add(thread)
    return frozenset(found)


def _descriptor_of(loop: str) -> int | None:
    """The descriptor that an event loop waits on; None if it cannot be seen."""
    for _ in range(_NUM_LOOKS):
        try:
            call = _read(f"/proc/self/task/{loop}/syscall").split()
        except OSError:
            return None
        if len(call) > 1 and "[eventpoll]" in _target(str(int(call[1], 16))):
            return int(call[1], 16)
        time.sleep(_POLL_S)
    return None


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
