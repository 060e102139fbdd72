"""Check from event logs that every sample was trained on exactly once. Pure.

Scripts that want to be counted log the samples they fetched as ``batch`` *before* they vote, and ``step`` after the
batch was taken. A batch counts as taken in a generation if any rank of it logged so: then all its ranks had voted, so
all had logged what they fetched, also those that were killed a moment later.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remesh.elasticity.training.position import Position, plan_batch


@dataclass(frozen=True, slots=True)
class SampleCount:
    """How the samples that were trained on compare with the stream that should have been."""

    lost: int
    repeated: int
    total: int


def samples_taken(events: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
    """Step -> the samples of every batch that was taken at it: twice as many if a batch was trained on twice."""
    axes = {event["number"]: event["axes"] for event in events if event["kind"] == "generation"}
    taken = {(event["generation"], event["step"]) for event in events if event["kind"] == "step"}
    shares: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
    for event in events:
        if event["kind"] == "batch":
            # Ranks that differ only in tp fetch the same share: one of them speaks for it.
            share = event["rank"] // axes[event["generation"]].get("tp", 1)
            shares[event["generation"], event["step"] + 1][share] = event["samples"]
    found: dict[int, list[int]] = defaultdict(list)
    for generation, step in sorted(taken):
        for samples in shares[generation, step].values():
            found[step] += samples
    return dict(found)


def count_samples(
    jobs: Sequence[Sequence[Mapping[str, Any]]], *, num_samples: int, batch_size: int, seed: int
) -> SampleCount:
    """Compare what was taken, over the events of jobs that follow one another, with the sample stream."""
    taken: dict[int, list[int]] = defaultdict(list)
    for events in jobs:
        for step, samples in samples_taken(events).items():
            taken[step] += samples
    lost = repeated = 0
    position = Position()
    for step in range(1, max(taken, default=0) + 1):
        expected = plan_batch(position, num_samples=num_samples, batch_size=batch_size, seed=seed, num_epochs=None)
        position = position.after(len(expected))
        lost += (Counter(expected) - Counter(taken[step])).total()
        repeated += (Counter(taken[step]) - Counter(expected)).total()
    return SampleCount(lost, repeated, sum(map(len, taken.values())))
