"""Attributes that the kernel keeps of threads and processes: a table of how each is read, and set again.

They are read and set from outside; what only a thread itself may ask for stands in `capture` and `restore_member`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from remesh.foundation.linux.calls import system_call

LIMITS: Final = range(16)
"""The numbers of all resource limits."""
_PRIORITY_BITS: Final = 8
_OF_PROCESS: Final = 1  # of ioprio_get: one process or thread, by its id


@dataclass(frozen=True, slots=True)
class _Attribute:
    """How an attribute is read and set, by the id of its thread or process."""

    read: Callable[[int], int]
    set: Callable[[int, int], object]


def _set_scheduler(tid: int, value: int) -> None:
    os.sched_setscheduler(tid, value >> _PRIORITY_BITS, os.sched_param(value & ((1 << _PRIORITY_BITS) - 1)))


OF_THREADS: Final = {
    "scheduling class": _Attribute(
        lambda tid: os.sched_getscheduler(tid) << _PRIORITY_BITS | os.sched_getparam(tid).sched_priority,
        _set_scheduler,
    ),
    "nice value": _Attribute(
        lambda tid: os.getpriority(os.PRIO_PROCESS, tid), lambda tid, nice: os.setpriority(os.PRIO_PROCESS, tid, nice)
    ),
    "I/O priority": _Attribute(
        lambda tid: system_call("ioprio_get", _OF_PROCESS, tid),
        lambda tid, priority: system_call("ioprio_set", _OF_PROCESS, tid, priority),
    ),
}
OF_PROCESSES: Final = {
    "oom_score_adj": _Attribute(
        lambda pid: int(Path(f"/proc/{pid}/oom_score_adj").read_text()),
        lambda pid, score: Path(f"/proc/{pid}/oom_score_adj").write_text(f"{score}"),
    ),
}
_ALL: Final = {**OF_THREADS, **OF_PROCESSES}


def read_attributes(table: Mapping[str, _Attribute], number: int) -> dict[str, int]:
    """The attributes of a thread or process, by name."""
    return {name: each.read(number) for name, each in table.items()}


def set_attributes(wanted: Iterable[tuple[int, Mapping[str, int]]]) -> str:
    """Set those that differ, of threads and processes by id; returns a note on what this user may not set, or ""."""
    refused: dict[str, str] = {}
    for number, attributes in wanted:
        for name, value in attributes.items():
            if _ALL[name].read(number) == value:
                continue
            try:
                _ALL[name].set(number, value)
            except OSError as error:
                refused[name] = f"the {name} of process {number} could not be set to {value} again: {error.strerror}"
    return "; ".join(refused.values())
