"""Is this a plan? The check that every plan passes once, when it is made.

What holds afterwards, whoever made the plan:

1. Names of tensors are distinct and ascending; every chunk part and copy is of a tensor that is there, and the sizes
   of chunks are right.
2. In a round a rank gives at most one message and takes at most one; rounds never go down.
3. Whoever gives a chunk holds every part of it in the source layout, or took that chunk in an earlier round.
   Whoever copies a box holds it.
4. What a rank takes and copies of a tensor lies inside what it wants, no element comes twice, and together it is all
   that the rank wants and anybody holds.

The check reads the two layouts and the messages only. It knows nothing of bounds, routes and streams, so a mistake in
the planner cannot hide in it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

from remesh.errors import PlanError
from remesh.layout import Box, Layout, Shard, compute_missing
from remesh.layout.box_array import BoxArray, is_disjoint
from remesh.reshard.model.program import Copy, Message
from remesh.reshard.model.tasks import TensorMove
from remesh.reshard.schedule.stream import Chunk

_DOING = "checking a reshard plan"
_PAIRWISE = 24
"""Up to this many boxes, comparing each with each is quicker than making arrays of them."""


def check_plan(
    moves: Sequence[TensorMove],
    host_of: Mapping[int, str],
    chunks: Sequence[Chunk],
    messages: Sequence[Message],
    copies: Sequence[Copy],
) -> None:
    """Raise `PlanError`, naming the tensor, rank and box, unless all that the module docstring lists holds."""
    for before, after in itertools.pairwise(moves):
        if before.name >= after.name:
            raise PlanError(f"{_DOING}: tensor {after.name!r} comes after {before.name!r}, expected ascending names")
    _check_parts(moves, chunks, copies)
    _check_rounds(host_of, chunks, messages)
    sides = _Sides()
    _check_givers(moves, chunks, messages, copies, sides)
    arrived = _collect_arrivals(len(moves), chunks, messages, copies)
    for move, by_rank in zip(moves, arrived, strict=True):
        _check_arrivals(move, by_rank, sides)


class _Sides:
    """What ranks hold and want, worked out once for each layout, however many tensors have it."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int], tuple[Box, ...]] = {}
        self._holds: dict[tuple[int, int, int], bool] = {}
        self._fits: dict[tuple[int, ...], bool] = {}
        self._wanted: dict[int, dict[int, int]] = {}

    # Tensors of one layout share their boxes too, so what was found for one box object is found for all of them.

    def holds(self, layout: Layout, rank: int, box: Box) -> bool:
        """Whether one shard of the rank contains the box."""
        known = (id(layout), rank, id(box))
        if known not in self._holds:
            key = (id(layout), rank)
            if key not in self._boxes:
                self._boxes[key] = tuple({shard.box for shard in layout.shards_of(rank)})
            self._holds[known] = any(_contains(each, box) for each in self._boxes[key])
        return self._holds[known]

    def fits(self, layout: Layout, rank: int, boxes: Sequence[Box]) -> bool:
        """Whether the boxes are disjoint and each lies in a shard of the rank."""
        known = (id(layout), rank, *map(id, boxes))
        if known not in self._fits:
            self._fits[known] = all(self.holds(layout, rank, box) for box in boxes) and _are_disjoint(boxes)
        return self._fits[known]

    def wanted(self, layout: Layout) -> dict[int, int]:
        """Elements that each rank wants, those wanted twice counted once."""
        if id(layout) not in self._wanted:
            wanted = self._wanted[id(layout)] = {}
            for size, shards in zip(layout.atoms.boxes.sizes.tolist(), layout.atoms.shards, strict=True):
                for rank in _ranks_of(shards):
                    wanted[rank] = wanted.get(rank, 0) + size
        return self._wanted[id(layout)]


def _contains(outer: Box, inner: Box) -> bool:
    # The same as Box.contains for boxes that have elements and as many dims; called for every part of a plan.
    return all(map(operator.le, outer.start, inner.start)) and all(map(operator.ge, outer.stop, inner.stop))


def _size(box: Box) -> int:
    return math.prod(map(operator.sub, box.stop, box.start))


def _are_disjoint(boxes: Sequence[Box]) -> bool:
    if len(boxes) > _PAIRWISE:
        return is_disjoint(BoxArray.of(boxes, boxes[0].ndim))
    return all(
        any(map(operator.le, a.stop, b.start)) or any(map(operator.le, b.stop, a.start))
        for a, b in itertools.combinations(boxes, 2)
    )


def _num_lost(move: TensorMove, rank: int) -> int:
    """Elements that the rank wants and nobody holds."""
    mine = replace(move.dst, shards=move.dst.shards_of(rank))
    return sum(_size(box) for box in compute_missing(move.src, mine, move.name))


def _ranks_of(shards: Sequence[Shard]) -> set[int]:
    return {shard.holder for shard in shards if isinstance(shard.holder, int)}


def _check_parts(moves: Sequence[TensorMove], chunks: Sequence[Chunk], copies: Sequence[Copy]) -> None:
    itemsizes = [move.src.itemsize_bytes for move in moves]
    for number, chunk in enumerate(chunks):
        last = 1 << 10
        for part in chunk.parts:
            _check_box(moves, part.tensor, part.box)
            itemsize = itemsizes[part.tensor]
            if part.nbytes != _size(part.box) * itemsize or itemsize > last:
                raise PlanError(
                    f"{_DOING}: part {part.box} of tensor {moves[part.tensor].name!r} in chunk {number} has "
                    f"{part.nbytes} bytes of item size {itemsize}, expected {_size(part.box) * itemsize} bytes and an "
                    f"item size of at most {last}; the plan is damaged, plan again"
                )
            last = itemsize
        if not chunk.parts or chunk.nbytes != sum(part.nbytes for part in chunk.parts):
            raise PlanError(f"{_DOING}: chunk {number} says {chunk.nbytes} bytes, which its parts do not add up to")
    for copy in copies:
        _check_box(moves, copy.tensor, copy.box)
        if not copy.ranks or list(copy.ranks) != sorted(set(copy.ranks)):
            raise PlanError(f"{_DOING}: copy of {copy.box} names ranks {copy.ranks}, expected distinct ascending ones")


def _check_box(moves: Sequence[TensorMove], tensor: int, box: Box) -> None:
    if not 0 <= tensor < len(moves):
        raise PlanError(f"{_DOING}: box {box} belongs to tensor number {tensor}, expected 0 to {len(moves) - 1}")
    if len(box.start) != len(moves[tensor].src.global_shape) or _size(box) == 0:
        raise PlanError(
            f"{_DOING}: box {box} of tensor {moves[tensor].name!r} is empty or has {box.ndim} dims, expected elements "
            f"and {moves[tensor].src.ndim} dims"
        )


def _check_rounds(host_of: Mapping[int, str], chunks: Sequence[Chunk], messages: Sequence[Message]) -> None:
    busy: set[tuple[int, int, str]] = set()
    now = 0
    for message in messages:
        if message.giver == message.taker or not {message.giver, message.taker} <= host_of.keys():
            raise PlanError(
                f"{_DOING}: a message goes from rank {message.giver} to {message.taker}, expected two different ranks "
                "with known hosts"
            )
        if not 0 <= message.chunk < len(chunks) or message.round < now:
            raise PlanError(
                f"{_DOING}: a message of round {message.round} after round {now} carries chunk {message.chunk}, "
                f"expected rounds that never go down and chunks 0 to {len(chunks) - 1}"
            )
        now = message.round
        for end in ((now, message.giver, "gives"), (now, message.taker, "takes")):
            if end in busy:
                raise PlanError(f"{_DOING}: rank {end[1]} {end[2]} twice in round {now}, expected at most once")
            busy.add(end)


def _check_givers(
    moves: Sequence[TensorMove],
    chunks: Sequence[Chunk],
    messages: Sequence[Message],
    copies: Sequence[Copy],
    sides: _Sides,
) -> None:
    took_in: dict[tuple[int, int], int] = {}
    known: set[tuple[int, int]] = set()
    for message in messages:
        origin = (message.giver, message.chunk)
        if took_in.get(origin, message.round) >= message.round and origin not in known:
            for part in chunks[message.chunk].parts:
                move = moves[part.tensor]
                if not sides.holds(move.src, message.giver, part.box):
                    raise PlanError(
                        f"{_DOING}: rank {message.giver} gives {part.box} of tensor {move.name!r} in round "
                        f"{message.round}, expected that it holds it or took it before, found neither"
                    )
            known.add(origin)
        took_in.setdefault((message.taker, message.chunk), message.round)
    for copy in copies:
        for rank in copy.ranks:
            if not sides.holds(moves[copy.tensor].src, rank, copy.box):
                raise PlanError(
                    f"{_DOING}: rank {rank} copies {copy.box} of tensor {moves[copy.tensor].name!r}, which it does not "
                    "hold; plan again"
                )


def _collect_arrivals(
    num_moves: int, chunks: Sequence[Chunk], messages: Sequence[Message], copies: Sequence[Copy]
) -> list[dict[int, list[Box]]]:
    """For each tensor the boxes that reach each rank."""
    arrived: list[dict[int, list[Box]]] = [{} for _ in range(num_moves)]
    for message in messages:
        for part in chunks[message.chunk].parts:
            arrived[part.tensor].setdefault(message.taker, []).append(part.box)
    for copy in copies:
        for rank in copy.ranks:
            arrived[copy.tensor].setdefault(rank, []).append(copy.box)
    return arrived


def _check_arrivals(move: TensorMove, by_rank: Mapping[int, Sequence[Box]], sides: _Sides) -> None:
    wanted = sides.wanted(move.dst)
    for rank in sorted(wanted.keys() | by_rank.keys()):
        boxes = by_rank.get(rank, ())
        size = sum(map(_size, boxes))
        expected = wanted.get(rank, 0)
        if size != expected:
            expected -= _num_lost(move, rank)
        if size != expected or not sides.fits(move.dst, rank, boxes):
            raise PlanError(
                f"{_DOING}: rank {rank} gets {size} elements of tensor {move.name!r} in {len(boxes)} boxes, expected "
                f"the {expected} that it wants, each once and none outside; plan again"
            )
