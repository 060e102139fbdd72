"""Edges between stages on the same ranks: the values change their layout there, if at all, and never wait.

A lane of them has no thread. All ranks of the two stages do the same actions in the same order; so, when a value is
made, they move it at once. What is taken is memory of its own, as of any lane.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from remesh.pipeline.running.edges import FIRST_TAG, NUM_AHEAD, LaneEnd, Passage


class LocalLane:
    """One direction of a route between two stages of this rank, for one step."""

    def __init__(self, number: int, end: LaneEnd) -> None:
        """``number`` is the lane's among all of the pipeline, the same on all its ranks."""
        self._end = end
        self._tag = FIRST_TAG + NUM_AHEAD * number
        self._there: dict[int, dict[str, torch.Tensor]] = {}

    def give(self, microbatch: int, values: Mapping[str, torch.Tensor]) -> None:
        """Move the values of a micro-batch; blocks until all ranks of the stages have come to this."""
        taken, job = self._end.moving(self._end.select(microbatch, values))
        job.run_unconfirmed(self._tag)
        self._there[microbatch] = taken

    def cross(self, microbatch: int) -> None:
        """Nothing: what was given is there."""

    def take(self, microbatch: int) -> dict[str, torch.Tensor]:
        """The values of a micro-batch, once."""
        return self._end.scaled(self._there.pop(microbatch))

    def passages(self, started_s: float) -> tuple[Passage, ...]:
        """None: nothing is on its way."""
        return ()
