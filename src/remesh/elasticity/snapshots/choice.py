"""Choice of the boxes that need snapshots, and of the rank that takes each.

*Choice.* State that lies on two nodes or more survives a node's death without any snapshot. If every box of every
tensor does, none is taken. Otherwise a step to go back to needs every box, so each box is taken once, by the lowest
rank that holds it, and kept twice: on that rank's node and on its keeper
(:mod:`remesh.elasticity.model.rank_assignment`).

*Sources.* On recovery every step of which some rank or snapshot holds a part is a candidate, the newest first: workers'
memory at the newest step, and snapshots. The first candidate at which every wanted box is held, by memory or snapshot,
is taken, unless the last checkpoint is newer. So sources mix per box, but never steps.
(:mod:`remesh.elasticity.training.fill` does this.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remesh.layout import Box
from remesh.resharding.model.tasks import TensorMove


@dataclass(frozen=True, slots=True)
class SnapshotChoice:
    """The boxes that one rank takes snapshots of."""

    boxes: Mapping[str, frozenset[Box]]
    """Tensor name -> boxes that this rank takes. Invariant: empty on all ranks, or every box is taken by one rank."""
    reason: str


def choose_boxes(moves: Sequence[TensorMove], rank: int, node_of: Mapping[int, int]) -> SnapshotChoice:
    """What ``rank`` takes, from what all ranks hold (the ``src`` side of the moves)."""
    holders: dict[tuple[str, Box], list[int]] = {}
    for move in moves:
        for shard in move.src.shards:
            assert isinstance(shard.holder, int)
            holders.setdefault((move.name, shard.box), []).append(shard.holder)
    alone = [key for key, ranks in holders.items() if len({node_of[one] for one in ranks}) < 2]
    if not alone:
        return SnapshotChoice({}, "every box lies on two nodes or more: replicas serve")
    if len(set(node_of.values())) < 2:
        reason = f"{len(alone)} of {len(holders)} boxes lie on one node, and there is no other: kept here only"
    else:
        reason = f"{len(alone)} of {len(holders)} boxes lie on one node: kept there and on another"
    mine: dict[str, set[Box]] = {}
    for (name, box), ranks in holders.items():
        if min(ranks) == rank:
            mine.setdefault(name, set()).add(box)
    return SnapshotChoice({name: frozenset(boxes) for name, boxes in mine.items()}, reason)
