"""Phases of a recovery: what lies between a kill and the next step, out of the events. Pure.

    killed ─computing─> at its next collective ─noticed─> out of the broken collective ─met─> at the meeting
           ─planned─> plan read ─rebuilt─> groups and mesh made ─moved─> state filled ─first step─> step taken

Each mark is the moment at which the last survivor got there. While it computes a rank learns of nothing: that part is
the program's own, and as long as what is left of its step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PHASES = ("computing", "noticed", "met", "planned", "rebuilt", "moved", "first step")
_MARKS = ("left", "meeting", "generation", "grown", "filled", "step")
"""The kinds of events that end the phases."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill and what came of it."""

    seconds: float
    """From the kill to the first step on the new mesh that the last survivor took."""
    steps_lost: int
    phases: Mapping[str, float]
    """Seconds by phase; empty for programs that do not tell."""


def split_recovery(
    events: Sequence[Mapping[str, Any]], *, killed_s: float, generation: int, num_survivors: int, step_s: float
) -> dict[str, float]:
    """Seconds of each phase; their sum is the recovery. ``generation`` is the first after the kill.

    A program computes for ``step_s`` from one step that it tells to its next collective.
    """
    survivors = {event["who"] for event in events if event["kind"] == "left" and event["t"] >= killed_s}
    begun = [e["t"] for e in events if e["kind"] == "step" and e["t"] <= killed_s and e["who"] in survivors]
    marks = [max(begun, default=killed_s - step_s) + step_s]
    for kind in _MARKS:
        number = generation - (kind == "left")
        key = "number" if kind == "generation" else "generation"
        first: dict[str, float] = {}
        for event in events:
            if event["kind"] == kind and event.get(key) == number and event["t"] >= killed_s:
                first.setdefault(event["who"], event["t"])
        marks.append(max(first.values(), default=killed_s))
    assert len({e["who"] for e in events if e["kind"] == "step" and e["generation"] == generation}) == num_survivors
    marks[0] = max(killed_s, min(marks[0], marks[1]))
    found, before = {}, killed_s
    for phase, at in zip(PHASES, marks, strict=True):
        # The last one out may be behind the first agent at the meeting: no phase is negative, none is counted twice.
        found[phase] = max(0.0, at - before)
        before = max(before, at)
    return found
