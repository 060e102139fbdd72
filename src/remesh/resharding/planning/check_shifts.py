"""Is this a plan, if its messages follow a rule? What the rule needs, and what each rank makes of it.

Messages of shifts follow from moves and hosts, so they cannot be damaged; but the rule is right only for moves of its
kind (`remesh.resharding.schedule.shifts` has the argument). Checked when the plan is made, on all ranks alike:

1. The pieces of either side are disjoint and are all of their tensor; who keeps one piece is on one host.
2. Every copy is wanted by its ranks, and, as `check` has seen, held. None comes twice, and together they are all that
   ranks hold of what they want.

Checked by each rank, when it works out its own messages:

3. It gives at most one message in a round and takes at most one. What it gives it holds, or took in an earlier round.
4. What it takes and copies lies inside what it wants, no element comes twice, and together it is all.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout, compute_overlap
from remesh.layout.box_array import BoxArray, is_disjoint
from remesh.resharding.model.program import Copy, Program
from remesh.resharding.model.tasks import TensorMove
from remesh.resharding.planning.sides import DOING, Sides
from remesh.resharding.schedule.shifts import ChunkTable, Shifts


def check_shifts(
    shifts: Shifts, moves: Sequence[TensorMove], host_of: Mapping[int, str], copies: Sequence[Copy], sides: Sides
) -> None:
    """Raise `PlanError` unless this plan may go by rule, and copies what it has to."""
    if shifts.moves != tuple(moves) or shifts.host_of != host_of:
        raise PlanError(
            f"{DOING}: its messages follow a rule for other moves or hosts, expected the rule of this plan; plan again"
        )
    seen: set[int] = set()
    for move in moves:
        for layout in (move.src, move.dst):
            if id(layout) not in seen:
                _check_side(layout, move.name, host_of)
                seen.add(id(layout))
    _check_copies(moves, copies, sides)


def _check_side(layout: Layout, name: str, host_of: Mapping[int, str]) -> None:
    pieces = layout.atoms
    found = int(pieces.boxes.sizes.sum())
    if found != layout.size or (pieces.boxes.stops > np.array(layout.global_shape)).any():
        raise PlanError(
            f"{DOING}: one side of tensor {name!r} has {found} elements, or some beyond its bounds, expected exactly "
            f"its {layout.size} elements, since its messages follow a rule; plan again"
        )
    if not is_disjoint(pieces.boxes):
        raise PlanError(f"{DOING}: pieces of one side of tensor {name!r} share elements, expected none; plan again")
    for at, shards in enumerate(pieces.shards):
        hosts = {host_of[int(shard.holder)] for shard in shards}
        if len(hosts) != 1:
            raise PlanError(
                f"{DOING}: piece {pieces.boxes.box(at)} of tensor {name!r} is on {len(hosts)} hosts, expected one, for "
                "its messages follow a rule; plan again"
            )


def _check_copies(moves: Sequence[TensorMove], copies: Sequence[Copy], sides: Sides) -> None:
    by_tensor: dict[int, list[Copy]] = {}
    for copy in copies:
        by_tensor.setdefault(copy.tensor, []).append(copy)
    known: set[tuple[object, ...]] = set()
    for tensor, move in enumerate(moves):
        here = by_tensor.get(tensor, [])
        # Tensors of one layout share the objects of their boxes: what was found for one is found for all.
        key = (id(move.src), id(move.dst), *((id(copy.box), copy.ranks) for copy in here))
        if key in known:
            continue
        known.add(key)
        copied: dict[int, int] = {}
        for copy in here:
            for rank in copy.ranks:
                if not sides.holds(move.dst, rank, copy.box):
                    raise PlanError(
                        f"{DOING}: rank {rank} copies {copy.box} of tensor {move.name!r}, which it does not want; plan "
                        "again"
                    )
                copied[rank] = copied.get(rank, 0) + copy.box.size
        both = {int(rank) for rank in set(move.src.holders).intersection(move.dst.holders)}
        expected = {rank: size for rank in both if (size := _num_kept(move, rank))}
        if copied != expected or (here and not is_disjoint(BoxArray.of([copy.box for copy in here], move.src.ndim))):
            raise PlanError(
                f"{DOING}: {len(here)} copies of tensor {move.name!r} bring {sum(copied.values())} elements to "
                f"{len(copied)} ranks, expected each of the {sum(expected.values())} once that {len(expected)} ranks "
                "hold and want; plan again"
            )


def _num_kept(move: TensorMove, rank: int) -> int:
    """Elements of what the rank wants that it holds."""
    held, wanted = ({shard.box for shard in side.shards_of(rank)} for side in (move.src, move.dst))
    if len(held) == len(wanted) == 1:
        shared = next(iter(held)).intersect(next(iter(wanted)))
        return shared.size if shared is not None else 0
    mine = [replace(side, shards=side.shards_of(rank)) for side in (move.src, move.dst)]
    return int(compute_overlap(mine[0], mine[1], move.name).sizes.sum())


def check_part(shifts: Shifts, program: Program, rank: int) -> None:
    """Raise `PlanError` unless the rank gives only what it has, and gets all that it wants, each element once."""
    taken = {message.chunk: message.round for message in program.takes}
    own = [message.chunk for message in program.gives if message.chunk not in taken]
    early = [message for message in program.gives if message.round <= taken.get(message.chunk, -1)]
    for messages, verb in ((program.gives, "gives"), (program.takes, "takes")):
        if any(a.round >= b.round for a, b in itertools.pairwise(messages)):
            raise PlanError(f"{DOING}: rank {rank} {verb} twice in a round, expected at most once; plan again")
    if early or len(taken) < len(program.takes):
        raise PlanError(
            f"{DOING}: rank {rank} gives {len(early)} chunks before it has received them, and receives "
            f"{len(program.takes) - len(taken)} twice, expected neither; plan again"
        )
    held, wanted = shifts.tables_of(rank)
    _check_held(shifts.moves, _rows_of(held, own), rank)
    copied: dict[int, list[Box]] = {}
    for copy in program.copies:
        copied.setdefault(copy.tensor, []).append(copy.box)
    _check_wanted(shifts.moves, _rows_of(wanted, list(taken)), copied, rank)


def _rows_of(table: ChunkTable | None, numbers: Sequence[int]) -> dict[int, BoxArray]:
    """The parts of these chunks by tensor; those of chunks that are not in the table are missing."""
    if table is None or not numbers:
        return {}
    parts = table.parts_of(np.array(numbers, dtype=np.int64))
    order = np.argsort(parts.tensor, kind="stable")
    tensors, first = np.unique(parts.tensor[order], return_index=True)
    rows = zip(tensors.tolist(), np.split(order, first[1:]), strict=True)
    return {
        tensor: BoxArray(parts.starts[at, : parts.ndims[tensor]], parts.stops[at, : parts.ndims[tensor]])
        for tensor, at in rows
    }


def _check_held(moves: Sequence[TensorMove], given: Mapping[int, BoxArray], rank: int) -> None:
    for tensor, boxes in given.items():
        if not _are_inside(moves[tensor].src, rank, boxes):
            raise PlanError(
                f"{DOING}: rank {rank} gives some of tensor {moves[tensor].name!r} that it does not hold; plan again"
            )


def _check_wanted(
    moves: Sequence[TensorMove], taken: Mapping[int, BoxArray], copied: Mapping[int, Sequence[Box]], rank: int
) -> None:
    for tensor, move in enumerate(moves):
        boxes = BoxArray.of(copied.get(tensor, ()), move.dst.ndim)
        if tensor in taken:
            more = taken[tensor]
            boxes = BoxArray(np.concatenate((boxes.starts, more.starts)), np.concatenate((boxes.stops, more.stops)))
        found, expected = int(boxes.sizes.sum()), _num_wanted(move.dst, rank)
        if found != expected or not is_disjoint(boxes) or not _are_inside(move.dst, rank, boxes):
            raise PlanError(
                f"{DOING}: rank {rank} gets {found} elements of tensor {move.name!r} in {len(boxes)} boxes, expected "
                f"the {expected} that it wants, each once and none outside; plan again"
            )


def _num_wanted(layout: Layout, rank: int) -> int:
    boxes = {shard.box for shard in layout.shards_of(rank)}
    if len(boxes) < 2:
        return sum(box.size for box in boxes)
    return int(replace(layout, shards=layout.shards_of(rank)).atoms.boxes.sizes.sum())


def _are_inside(layout: Layout, rank: int, boxes: BoxArray) -> bool:
    """Whether each of the boxes lies in one shard of the rank."""
    inside = np.zeros(len(boxes), dtype=bool)
    for box in {shard.box for shard in layout.shards_of(rank)}:
        low, high = np.array(box.start, dtype=np.int64), np.array(box.stop, dtype=np.int64)
        inside |= (boxes.starts >= low).all(axis=1) & (boxes.stops <= high).all(axis=1)
    return bool(inside.all())
