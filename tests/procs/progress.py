"""Progress of processes, from the processor time that they have had, little as a busy machine gives."""

from __future__ import annotations

from remesh.foundation.linux.procfs import family_of, work_of

_LOOKING_AROUND = 100
"""Ticks. Threads of gloo that wait look around a hundred times a second: a rank of three groups has 20 in a minute."""


class Headway:
    """How often families of processes got somewhere: one of them was new, or did more than to wait since the last time.

    Each by itself, so that neither many who wait look busy, nor a program still whose processes live shortly.
    """

    def __init__(self, roots: list[int]) -> None:
        self._roots = roots
        self._before: dict[int, int] = {}
        self._times = 0

    def __call__(self) -> int:
        now = {pid: work_of(pid) for pid in family_of(*self._roots)}
        if any(pid not in self._before or work - self._before[pid] >= _LOOKING_AROUND for pid, work in now.items()):
            self._before = now
            self._times += 1
        return self._times
