"""Edges between pipeline stages over NCCL, in the one order that all ranks have planned.

Messages over NCCL have no tags, and are carried out in the order in which their rank has queued them. So lanes have no
threads here: the rank goes through its queue (`remesh.pipeline.queues`), and queues every crossing at its place there.
The host waits for none of it. On the device, with a stream for the crossings beside the one that computes:

    computes   F0 ──┐       F1 ──┐            ┌──> B0
    crossings       └─ give 0    └─ give 1  take 0

A giver's crossing waits for what has been computed so far, a taker's for nothing that is computed there: what comes is
taken into memory of its own while the stage computes, and what needs it waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from remesh.device.streams import DeviceClock, SideStream
from remesh.pipeline.running.edges import LaneEnd, Passage

_NO_TAG = 0


class QueuedLane:
    """One direction of a route on one rank that takes part in it, for one step; the rank's lanes share ``side``."""

    def __init__(self, end: LaneEnd, side: SideStream, clock: DeviceClock) -> None:
        self._end = end
        self._side = side
        self._clock = clock
        self._waiting: dict[int, dict[str, torch.Tensor]] = {}
        """Given and not yet queued, by micro-batch."""
        self._coming: dict[int, tuple[Any, dict[str, torch.Tensor]]] = {}
        """Queued and not yet taken: the place behind it, and the values."""
        self._spans: list[tuple[int, Any, Any]] = []
        """Micro-batch, and the clock at both ends of its crossing."""
        self.crossed: set[int] = set()
        """Micro-batches of which this is queued."""

    def give(self, microbatch: int, values: Mapping[str, torch.Tensor]) -> None:
        """What is to cross next."""
        self._waiting[microbatch] = self._end.select(microbatch, values)

    def cross(self, microbatch: int) -> None:
        """Queue the crossing of a micro-batch, whose values were given here, or are taken."""
        self.crossed.add(microbatch)
        leaving = self._waiting.pop(microbatch, {})
        with self._side.at_work(leaving.values()):
            taken, job = self._end.bind(leaving)
            begun = self._clock.mark()
            job.run_unconfirmed(_NO_TAG)
            self._spans.append((microbatch, begun, self._clock.mark()))
        if self._end.takes:
            self._coming[microbatch] = self._side.mark(), taken

    def take(self, microbatch: int) -> dict[str, torch.Tensor]:
        """The values of a micro-batch, once; what is computed from now on waits until they are there."""
        mark, values = self._coming.pop(microbatch)
        self._side.wait(mark, values.values())
        return self._end.scaled(values)

    def hold_up(self) -> None:
        """Let nothing be computed before what was given has left."""
        if self._end.gives:
            self._side.wait(self._side.mark())

    def passages(self, started_s: float) -> tuple[Passage, ...]:
        """How the micro-batches crossed; waits for the device. ``started_s`` is when the clock began."""
        return tuple(
            Passage(microbatch, started_s + self._clock.seconds(begun), started_s + self._clock.seconds(ended))
            for microbatch, begun, ended in self._spans
        )
