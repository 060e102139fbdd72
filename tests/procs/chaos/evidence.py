"""Line of steps that led to a job's end, out of the events of all its lives. Pure.

A job may go back: to a snapshot, to a checkpoint, or by being started again. Steps that it went back over do not
belong to its *line*: what counts is that the line has every step once, with the stream's samples and the undisturbed
loss.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remesh.elasticity.training.position import Position, plan_batch

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LineStep:
    """One step of the line."""

    samples: tuple[int, ...]
    losses: tuple[float, ...]
    """What the ranks said."""


@dataclass(frozen=True, slots=True)
class Line:
    """The steps that led to the end, by number from 1, and how many were gone back over."""

    steps: Mapping[int, LineStep]
    num_repeated: int


def trace_line(lives: Sequence[Sequence[Event]]) -> Line:
    """The line of a job, from the events of its lives in order."""
    line: dict[int, LineStep] = {}
    num_repeated = last = 0
    for events in lives:
        shares: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
        losses: dict[tuple[int, int], list[float]] = defaultdict(list)
        for event in events:
            if event["kind"] == "batch":
                shares[event["generation"], event["step"] + 1][event["share"]] = event["samples"]
            elif event["kind"] == "step":
                losses[event["generation"], event["step"]].append(event["loss"])
        for generation, step in sorted(losses):
            # Whoever takes a step again goes on from there: what was behind it is no longer part of the line.
            for other in range(step, last + 1):
                num_repeated += line.pop(other, None) is not None
            last = step
            samples = [one for each in shares[generation, step].values() for one in each]
            line[step] = LineStep(tuple(samples), tuple(losses[generation, step]))
    return Line(line, num_repeated)


def find_faults(line: Line, reference: Sequence[float], *, tolerance: float, stream: Mapping[str, int]) -> list[str]:
    """What is wrong with a line: steps missing, samples lost or repeated, losses off the reference; empty when nothing.

    ``stream`` has ``num_samples``, ``batch_size`` and ``seed``; ``reference`` the loss of each step.
    """
    found = []
    position = Position()
    for step in range(1, max(line.steps, default=0) + 1):
        expected = plan_batch(position, num_epochs=None, **stream)  # type: ignore[arg-type]
        position = position.after(len(expected))
        if step not in line.steps:
            found.append(f"step {step} was never taken")
            continue
        one = line.steps[step]
        if Counter(one.samples) != Counter(expected):
            found.append(f"step {step}: samples {sorted(one.samples)}, expected {sorted(expected)}")
        off = [loss for loss in one.losses if abs(loss - reference[step - 1]) > tolerance * abs(reference[step - 1])]
        if off:
            found.append(f"step {step}: loss {off[0]!r}, undisturbed {reference[step - 1]!r}")
    return found
