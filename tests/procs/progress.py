"""Do processes get anywhere? Told by the time of processors that they have had, little as a busy machine gives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from remesh.linux.procfs import children_of, work_of

_LOOKING_AROUND = 300
"""Ticks. Threads of gloo that wait look around a hundred times a second: ten ranks have 150 ticks in a minute so."""


def family_of(pid: int) -> list[int]:
    """A process and all that it has started and that still run, but for what they left behind."""
    family = [pid]
    for member in family:
        with contextlib.suppress(OSError):  # it ended just now
            family += children_of(member)
    return family


def work_in_earnest(pids: Iterable[int]) -> int:
    """A number that changes while processes do more than wait; to be compared over a minute or so."""
    return sum(map(work_of, pids)) // _LOOKING_AROUND
