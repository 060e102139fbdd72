"""Peak memory of each rank in a schedule.

A micro-batch is *live* on a stage from its F to its B or W: its activations are stashed. Between I and W it is
*delayed*: what the gradient of the inputs needed is gone, what that of the weights needs is kept. How much is live
depends on the order of a row alone, not on times, so what is computed here is what a run measures.

A stage with warm-up ``w`` and delay ``d`` has at most ``w + d`` live micro-batches, ``d`` of them delayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remesh.pipeline.actions import Action, ActionKind
from remesh.pipeline.costs import Costs
from remesh.pipeline.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Peak:
    """The most micro-batches and bytes that a rank keeps at once."""

    num_live: int
    """Most live micro-batches at one moment, delayed ones included, over all stages of the rank."""
    nbytes: int
    """Most bytes at one moment; 0 if costs were not given."""
    at: Action | None
    """The action that first brings the rank to that many bytes, or live micro-batches without costs."""


def compute_peaks(schedule: Schedule, costs: Costs | None = None) -> tuple[Peak, ...]:
    """The peak of each rank.

    >>> from remesh.pipeline.schedules import eager_one_f_one_b, zero_bubble_h1
    >>> [peak.num_live for peak in compute_peaks(eager_one_f_one_b(4, 16))]
    [7, 5, 3, 1]
    >>> [peak.num_live for peak in compute_peaks(zero_bubble_h1(4, 16))]
    [4, 4, 4, 4]
    """
    return tuple(peak_of_row(row, costs) for row in schedule.rows)


def peak_of_row(row: Sequence[Action], costs: Costs | None = None) -> Peak:
    """The peak of the rank that has this row."""
    num_live = nbytes = most_live = most_bytes = 0
    at: Action | None = None
    split = {(action.stage, action.microbatch) for action in row if action.kind is ActionKind.I}
    for action in row:
        cost = None if costs is None else costs.stages[action.stage]
        stash_bytes, kept_bytes = (0, 0) if cost is None else (cost.stash_bytes, cost.kept_bytes)
        if action.kind is ActionKind.F:
            num_live += 1
            nbytes += stash_bytes
        elif action.kind is ActionKind.I:
            nbytes += kept_bytes - stash_bytes
        else:
            num_live -= 1
            nbytes -= kept_bytes if (action.stage, action.microbatch) in split else stash_bytes
        if nbytes > most_bytes or (costs is None and num_live > most_live):
            at = action
        most_live, most_bytes = max(most_live, num_live), max(most_bytes, nbytes)
    return Peak(most_live, most_bytes, at)
