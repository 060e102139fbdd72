"""What do ranks hold and want? Answers that the checks of plans share, each worked out once."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import replace

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout, Shard, compute_missing
from remesh.layout.box import are_in_a_row
from remesh.layout.box_array import BoxArray, is_disjoint
from remesh.resharding.model.tasks import TensorMove

DOING = "checking a reshard plan"
_PAIRWISE = 24
"""Up to this many boxes, comparing each with each is quicker than making arrays of them."""


class Sides:
    """What ranks hold and want, worked out once for each layout, however many tensors have it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], _KeptBoxes] = {}
        self._fits: dict[tuple[int, ...], bool] = {}
        self._wanted: dict[int, dict[int, int]] = {}

    # Tensors of one layout share their boxes too, so what was found for one box object is found for all of them.

    def holds(self, layout: Layout, rank: int, box: Box) -> bool:
        """Whether one shard of the rank contains the box."""
        return self._kept_by(layout, rank).contains(box)

    def fits(self, layout: Layout, rank: int, boxes: Sequence[Box]) -> bool:
        """Whether the boxes are disjoint and each lies in a shard of the rank."""
        known = (id(layout), rank, *map(id, boxes))
        if known not in self._fits:
            kept = self._kept_by(layout, rank)
            self._fits[known] = all(map(kept.contains, boxes)) and _are_disjoint(boxes)
        return self._fits[known]

    def _kept_by(self, layout: Layout, rank: int) -> _KeptBoxes:
        key = (id(layout), rank)
        if key not in self._kept:
            self._kept[key] = _KeptBoxes(layout.shards_of(rank))
        return self._kept[key]

    def wanted(self, layout: Layout) -> dict[int, int]:
        """Elements that each rank wants, those wanted twice counted once."""
        if id(layout) not in self._wanted:
            wanted = self._wanted[id(layout)] = {}
            for size, shards in zip(layout.atoms.boxes.sizes.tolist(), layout.atoms.shards, strict=True):
                for rank in ranks_of(shards):
                    wanted[rank] = wanted.get(rank, 0) + size
        return self._wanted[id(layout)]


class _KeptBoxes:
    """The boxes of one rank in one layout, and what is known of them."""

    __slots__ = ("_boxes", "_known")

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._boxes = [shards[0].box] if len(shards) == 1 else list({shard.box for shard in shards})
        self._known: dict[int, bool] = {}
        """By identity of a box, whether one of these boxes contains it."""

    def contains(self, box: Box) -> bool:
        known = self._known.get(id(box))
        if known is None:
            known = self._known[id(box)] = any(_contains(each, box) for each in self._boxes)
        return known


def _contains(outer: Box, inner: Box) -> bool:
    # The same as Box.contains for boxes that have elements and as many dims; called for every part of a plan.
    return all(map(operator.le, outer.start, inner.start)) and all(map(operator.ge, outer.stop, inner.stop))


def size_of(box: Box) -> int:
    """Elements of a box."""
    return math.prod(map(operator.sub, box.stop, box.start))


def _are_disjoint(boxes: Sequence[Box]) -> bool:
    if len(boxes) > _PAIRWISE:
        return is_disjoint(BoxArray.of(boxes, boxes[0].ndim))
    return are_in_a_row(boxes) or all(
        any(map(operator.le, a.stop, b.start)) or any(map(operator.le, b.stop, a.start))
        for a, b in itertools.combinations(boxes, 2)
    )


def num_lost(move: TensorMove, rank: int) -> int:
    """Elements that the rank wants and nobody holds."""
    mine = replace(move.dst, shards=move.dst.shards_of(rank))
    return sum(size_of(box) for box in compute_missing(move.src, mine, move.name))


def ranks_of(shards: Sequence[Shard]) -> set[int]:
    """The ranks that hold any of these shards."""
    return {shard.holder for shard in shards if isinstance(shard.holder, int)}


def check_box(moves: Sequence[TensorMove], tensor: int, box: Box) -> int:
    """Elements of the box; raises `PlanError` unless this may be a box of this tensor."""
    if not 0 <= tensor < len(moves):
        raise PlanError(f"{DOING}: box {box} belongs to tensor number {tensor}, expected 0 to {len(moves) - 1}")
    size = size_of(box)
    if len(box.start) != len(moves[tensor].src.global_shape) or size == 0:
        raise PlanError(
            f"{DOING}: box {box} of tensor {moves[tensor].name!r} is empty or has {box.ndim} dims, expected elements "
            f"and {moves[tensor].src.ndim} dims"
        )
    return size
