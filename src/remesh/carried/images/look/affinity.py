"""CPU affinity of a restored process's threads: the same places in the new set of processors.

A *seat* is the affinity mask that a launcher has given to a rank: the processors that its init may run on. Sets are
numbers with bit n for processor n. A thread that had the whole seat has the whole new one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


def processors_of(tid: int) -> int:
    """The processors that a thread may run on; 0 for the calling one."""
    return sum(1 << cpu for cpu in os.sched_getaffinity(tid))


def set_processors(tid: int, cpus: int) -> None:
    """Let a thread run on these alone."""
    os.sched_setaffinity(tid, _members(cpus))


def move_masks(masks: Sequence[int], old: int, new: int) -> list[int] | None:
    """The masks of threads on a new set of processors; None when it has too few processors for one of them.

    >>> move_masks([0b0100, 0b1000, 0b1100], 0b1100, 0b110000)
    [16, 32, 48]
    >>> move_masks([0b0100, 0b1000, 0b1100], 0b1100, 0b1) is None
    True
    >>> move_masks([0b1100], 0b1100, 0b1)
    [1]
    """
    places = _members(new)
    moved = []
    for mask in masks:
        if mask == old:
            moved.append(new)
            continue
        whole = _members(old | mask)  # a program may leave the processors that it was given
        wanted = [whole.index(cpu) for cpu in _members(mask)]
        if wanted[-1] >= len(places):
            return None
        moved.append(sum(1 << places[at] for at in wanted))
    return moved


def _members(cpus: int) -> list[int]:
    return [cpu for cpu in range(cpus.bit_length()) if cpus >> cpu & 1]
