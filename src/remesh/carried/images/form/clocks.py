"""Clocks of a process, carried across machines by a time namespace."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from remesh.foundation.linux import calls


class Clocks(NamedTuple):
    """The clocks that begin anew on each machine, as a process sees them."""

    monotonic_ns: int  # CLOCK_MONOTONIC
    boottime_ns: int  # CLOCK_BOOTTIME


def clocks_of(pid: int) -> Clocks:
    """Read the clocks of another process; it may be in another time namespace."""
    here, theirs = _offsets(os.getpid()), _offsets(pid)
    return Clocks(
        time.clock_gettime_ns(time.CLOCK_MONOTONIC) + theirs.monotonic_ns - here.monotonic_ns,
        time.clock_gettime_ns(time.CLOCK_BOOTTIME) + theirs.boottime_ns - here.boottime_ns,
    )


def set_clocks(wanted: Clocks) -> bool:
    """Let the clocks of future children show this; returns whether the kernel could. Before the first child."""
    if not Path("/proc/self/ns/time_for_children").exists():
        return False
    now, here = clocks_of(os.getpid()), _offsets(os.getpid())
    try:
        calls.unshare(calls.NEW_TIME)
        lines = (
            _line("monotonic", wanted.monotonic_ns - now.monotonic_ns + here.monotonic_ns),
            _line("boottime", wanted.boottime_ns - now.boottime_ns + here.boottime_ns),
        )
        Path("/proc/self/timens_offsets").write_text("\n".join(lines) + "\n")
    except OSError:
        return False
    return True


def _line(clock: str, offset_ns: int) -> str:
    seconds, nanoseconds = divmod(offset_ns, 10**9)
    return f"{clock} {seconds} {nanoseconds}"


def _offsets(pid: int) -> Clocks:
    """The offsets of a process's clocks from the host's."""
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/timens_offsets").read_text().splitlines()]
    except OSError:
        return Clocks(0, 0)
    found = {name: int(seconds) * 10**9 + int(nanoseconds) for name, seconds, nanoseconds in lines}
    return Clocks(found.get("monotonic", 0), found.get("boottime", 0))
