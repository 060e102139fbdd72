"""Which sockets of this process are gloo's? Those that its event loops wait on, as the kernel tells.

gloo says nothing of its sockets, and those that appear while groups are made may be the program's: a thread that talks
to a database opens some whenever it likes. But each of gloo's devices has a thread of a known name, which sits in
``epoll_wait``; the kernel tells on which descriptor, and which sockets that one watches:

    /proc/self/task/<tid>/comm        gloo_tcp_loop
    /proc/self/task/<tid>/syscall     232 0x16 ...          the first argument: descriptor 22
    /proc/self/fdinfo/22              tfd: 23 ...           a socket that it waits for
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

Socket = tuple[int, int]
"""Descriptor and inode, so that a descriptor that was used again since is told apart."""

_LOOP_NAMES = ("gloo_tcp_loop", "gloo_tls_loop")
_WATCHED = re.compile(r"^tfd:\s+(\d+)", re.MULTILINE)
_NUM_LOOKS = 50
_PAUSE_S = 2e-4
"""A loop that handles an event is back in its call soon."""


def open_sockets() -> frozenset[Socket]:
    """Every socket of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        target = _target(name)
        if target.startswith("socket:["):
            found.add((int(name), int(target[8:-1])))
    return frozenset(found)


def pick_gloos(sockets: frozenset[Socket]) -> frozenset[Socket]:
    """Those of ``sockets`` that a loop of gloo waits on; all of them where the kernel does not tell of the loops."""
    loops = _loops()
    watched: set[int] = set()
    for loop in loops:
        descriptor = _descriptor_of(loop)
        if descriptor is None:
            return sockets
        with contextlib.suppress(OSError):
            watched |= {int(one) for one in _WATCHED.findall(Path(f"/proc/self/fdinfo/{descriptor}").read_text())}
    return frozenset(one for one in sockets if one[0] in watched) if loops else sockets


def _loops() -> list[str]:
    """The threads of gloo's event loops."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/self/task/{thread}/comm").read_text().strip()
            found += [thread] if name in _LOOP_NAMES else []
    return found


def _descriptor_of(loop: str) -> int | None:
    """What a loop waits on; None if it cannot be seen."""
    for _ in range(_NUM_LOOKS):
        try:
            call = Path(f"/proc/self/task/{loop}/syscall").read_text().split()
        except OSError:
            return None
        if len(call) > 1 and "[eventpoll]" in _target(str(int(call[1], 16))):
            return int(call[1], 16)
        time.sleep(_PAUSE_S)
    return None


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
