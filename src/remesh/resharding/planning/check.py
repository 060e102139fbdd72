"""Is this a plan? The check that every plan passes once, when it is made.

What holds afterwards, whoever made the plan:

1. Names of tensors are distinct and ascending; every chunk part and copy is of a tensor that is there, and the sizes
   of chunks are right.
2. In a round a rank gives at most one message and takes at most one; rounds never go down.
3. Whoever gives a chunk holds every part of it in the source layout, or took that chunk in an earlier round.
   Whoever copies a box holds it.
4. What a rank takes and copies of a tensor lies inside what it wants, no element comes twice, and together it is all
   that the rank wants and anybody holds.

Messages that are flows (`remesh.resharding.schedule.flows`) are checked as such (`check_flows`), with the same outcome;
of messages by rule (`remesh.resharding.schedule.shifts`) what the rule needs is checked (`check_shifts`).

The check reads the two layouts and the messages only. It knows nothing of bounds, routes and streams, so a mistake in
the planner cannot hide in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from remesh.foundation.errors import PlanError
from remesh.layout import Box
from remesh.resharding.model.program import Copy, Message
from remesh.resharding.model.tasks import TensorMove
from remesh.resharding.planning.check_flows import check_flows
from remesh.resharding.planning.check_shifts import check_shifts
from remesh.resharding.planning.sides import DOING, Sides, check_box, num_lost, size_of
from remesh.resharding.schedule.flow_messages import FlowMessages
from remesh.resharding.schedule.shift_messages import ShiftChunks, ShiftMessages
from remesh.resharding.schedule.stream import Chunk


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
            raise PlanError(
                f"{DOING}: tensor {after.name!r} comes after {before.name!r}, expected ascending names; the plan is "
                "damaged, plan again"
            )
    sides = Sides()
    _check_copies(moves, copies, sides)
    if isinstance(messages, FlowMessages) and messages.flows.chunks is chunks and messages.flows.host_of == host_of:
        check_flows(moves, messages.flows, copies, sides)
        return
    if isinstance(messages, ShiftMessages) and isinstance(chunks, ShiftChunks) and chunks.shifts is messages.shifts:
        check_shifts(messages.shifts, moves, host_of, copies, sides)
        return
    # Boxes are known by their identity: they have to last.
    chunks = tuple(chunks)
    _check_parts(moves, chunks)
    _check_rounds(host_of, chunks, messages)
    _check_givers(moves, chunks, messages, sides)
    arrived = _collect_arrivals(len(moves), chunks, messages, copies)
    for move, by_rank in zip(moves, arrived, strict=True):
        _check_arrivals(move, by_rank, sides)


def _check_parts(moves: Sequence[TensorMove], chunks: Sequence[Chunk]) -> None:
    itemsizes = [move.src.itemsize_bytes for move in moves]
    for number, chunk in enumerate(chunks):
        last = 1 << 10
        for part in chunk.parts:
            size = check_box(moves, part.tensor, part.box)
            itemsize = itemsizes[part.tensor]
            if part.nbytes != size * itemsize or itemsize > last:
                raise PlanError(
                    f"{DOING}: part {part.box} of tensor {moves[part.tensor].name!r} in chunk {number} has "
                    f"{part.nbytes} bytes of item size {itemsize}, expected {size * itemsize} bytes and an "
                    f"item size of at most {last}; the plan is damaged, plan again"
                )
            last = itemsize
        if not chunk.parts or chunk.nbytes != sum([part.nbytes for part in chunk.parts]):
            raise PlanError(
                f"{DOING}: chunk {number} says {chunk.nbytes} bytes, which its parts do not add up to; the plan is "
                "damaged, plan again"
            )


def _check_copies(moves: Sequence[TensorMove], copies: Sequence[Copy], sides: Sides) -> None:
    known: set[tuple[int, int, tuple[int, ...]]] = set()
    for copy in copies:
        check_box(moves, copy.tensor, copy.box)
        # Tensors of one layout share the objects of their boxes: what was found for one is found for all.
        key = (id(moves[copy.tensor].src), id(copy.box), copy.ranks)
        if key in known:
            continue
        known.add(key)
        if not copy.ranks or list(copy.ranks) != sorted(set(copy.ranks)):
            raise PlanError(
                f"{DOING}: copy of {copy.box} names ranks {copy.ranks}, expected distinct ascending ones; the plan is "
                "damaged, plan again"
            )
        for rank in copy.ranks:
            if not sides.holds(moves[copy.tensor].src, rank, copy.box):
                raise PlanError(
                    f"{DOING}: rank {rank} copies {copy.box} of tensor {moves[copy.tensor].name!r}, which it does not "
                    "hold; plan again"
                )


def _check_rounds(host_of: Mapping[int, str], chunks: Sequence[Chunk], messages: Sequence[Message]) -> None:
    busy: set[tuple[int, int, str]] = set()
    now = 0
    for message in messages:
        if message.giver == message.taker or not {message.giver, message.taker} <= host_of.keys():
            raise PlanError(
                f"{DOING}: a message goes from rank {message.giver} to {message.taker}, expected two different ranks "
                "with known hosts; plan again, with a host for each rank"
            )
        if not 0 <= message.chunk < len(chunks) or message.round < now:
            raise PlanError(
                f"{DOING}: a message of round {message.round} after round {now} carries chunk {message.chunk}, "
                f"expected rounds that never go down and chunks 0 to {len(chunks) - 1}; the plan is damaged, plan again"
            )
        now = message.round
        for end in ((now, message.giver, "gives"), (now, message.taker, "takes")):
            if end in busy:
                raise PlanError(
                    f"{DOING}: rank {end[1]} {end[2]} twice in round {now}, expected at most once; plan again"
                )
            busy.add(end)


def _check_givers(
    moves: Sequence[TensorMove],
    chunks: Sequence[Chunk],
    messages: Sequence[Message],
    sides: Sides,
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
                        f"{DOING}: rank {message.giver} gives {part.box} of tensor {move.name!r} in round "
                        f"{message.round}, expected that it holds it or took it before, found neither; plan again"
                    )
            known.add(origin)
        took_in.setdefault((message.taker, message.chunk), message.round)


def _collect_arrivals(
    num_moves: int, chunks: Sequence[Chunk], messages: Sequence[Message], copies: Sequence[Copy]
) -> list[dict[int, list[Box]]]:
    """The boxes of each tensor that reach each rank."""
    arrived: list[dict[int, list[Box]]] = [{} for _ in range(num_moves)]
    for message in messages:
        for part in chunks[message.chunk].parts:
            arrived[part.tensor].setdefault(message.taker, []).append(part.box)
    for copy in copies:
        for rank in copy.ranks:
            arrived[copy.tensor].setdefault(rank, []).append(copy.box)
    return arrived


def _check_arrivals(move: TensorMove, by_rank: Mapping[int, Sequence[Box]], sides: Sides) -> None:
    wanted = sides.wanted(move.dst)
    for rank in sorted(wanted.keys() | by_rank.keys()):
        boxes = by_rank.get(rank, ())
        size = sum(map(size_of, boxes))
        expected = wanted.get(rank, 0)
        if size != expected:
            expected -= num_lost(move, rank)
        if size != expected or not sides.fits(move.dst, rank, boxes):
            raise PlanError(
                f"{DOING}: rank {rank} gets {size} elements of tensor {move.name!r} in {len(boxes)} boxes, expected "
                f"the {expected} that it wants, each once and none outside; plan again"
            )
