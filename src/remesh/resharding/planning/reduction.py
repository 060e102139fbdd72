"""Reduction of partial sums: running sums that travel through the holders of the addends.

Definitions. Of a tensor of partial sums every element has one *addend* from each of n; an addend may have replicas. A
*path* visits, for one box, a holder of each addend; what it carries is the *running sum*, of the same size as the box
however many addends went in. A *leg* is the part of a path on one rank: the running sum comes in, the rank joins its
addends, the running sum goes out, or stays as the whole value where the path ends. From there it is moved like any
other tensor, and all takers get the same bits.

Order. Addends are joined in ascending order, ``((0 + 1) + 2) + ...``, in the dtype in which they are held. The bits of
the result depend on nothing else: not on hosts, replicas, chunks or the network. With two addends a path may run
either way, because joining two is symmetric; the operands keep their places. Where the order makes no difference, for
integers, or may make one (`SumOrder.ANY`), paths are parts of a ring: each box begins behind an addend of a rank that
wants it, and ends there.

Cost. A path is a relay backwards (the transposed problem of multicast): every NIC on it carries the box once in and
once out, however many addends a host holds next to each other in the order. Two addends on two hosts send half each,
which is the least possible; so do n hosts in a ring that keep their parts of the result. In ascending order the
busiest of these has (n + 1) / (n - 1) times the least.

Algorithm:

1. Slices of the layout of addends and the layout that is wanted. Each must have every addend, and the boxes of one
   addend may not overlap unless they are equal: overlapping partial sums have no meaning.
2. For each slice, paths: next to go is the rank that is there already, then one on the same host, then the one with
   the least to send. Slices whose path could as well end on several ranks are divided among them.
3. Boxes of all tensors with equal paths are fused and cut into chunks; each chunk travels its path leg by leg, in
   rounds of at most one message out of and into each rank (`rounds`).
4. The reduction checks itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from remesh.foundation.errors import LayoutError, PlanError
from remesh.layout import Box, Layout, Shard, boxes_of_flat_range, compute_overlap
from remesh.resharding.model.program import Leg, Message
from remesh.resharding.model.tasks import Missing, SumOrder, TensorMove
from remesh.resharding.schedule.chunks import Chunk, Part
from remesh.resharding.schedule.order import Sending
from remesh.resharding.schedule.timeline import compute_rounds

_DOING = "planning the sum"
_BITWISE = frozenset({"band", "bor", "bxor"})
_INTEGERS = frozenset({"bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))})
_ORDERED = frozenset({"min", "max"})


@dataclass(frozen=True)
class Reduction:
    """How the partial sums of some tensors become whole values; frozen and checked."""

    moves: tuple[TensorMove, ...]
    """Tensors held as partial sums, by name."""
    wholes: tuple[Layout, ...]
    """For each of ``moves`` who has which whole values afterwards, one box after the other in a flat buffer."""
    chunks: tuple[Chunk, ...]
    """What running sums are cut into; part tensors count ``moves``."""
    legs: tuple[Leg, ...]
    """By chunk, then in the order of the path."""
    messages: tuple[Message, ...]
    """By round, then giver; ``chunk`` is the number of the leg that gives: the next leg takes."""
    num_addends: tuple[int, ...] = field(default=())
    """For each of ``moves`` how many addends an element has."""
    host_of: Mapping[int, str] = field(default_factory=dict, compare=False)
    """Host of every rank."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_rounds(self) -> int:
        return self.messages[-1].round + 1 if self.messages else 0

    def continues(self, leg: int) -> bool:
        """Whether the leg takes a running sum from the one before it."""
        return leg > 0 and self.legs[leg - 1].chunk == self.legs[leg].chunk

    def ends(self, leg: int) -> bool:
        """Whether the path ends with this leg."""
        return leg + 1 == len(self.legs) or self.legs[leg + 1].chunk != self.legs[leg].chunk

    @cached_property
    def lower_bound_bytes(self) -> int:
        """Bytes that no schedule keeps off the busiest NIC: all of a box comes into a host that wants it and lacks an
        addend, and leaves a host that alone has an addend of it and is not alone in wanting it."""
        through: dict[tuple[str, str], int] = {}
        for move, num_addends in zip(self.moves, self.num_addends, strict=True):
            for box, holders, takers in _slices(move, num_addends, Missing.LEAVE):
                nbytes = box.size * move.src.itemsize_bytes
                homes = [{self.host_of[rank] for rank in ranks} for ranks in holders]
                wanting = {self.host_of[rank] for rank in takers}
                into = {host for host in wanting if not all(host in home for home in homes)}
                out = {host for home in homes if len(home) == 1 for host in home if wanting - home}
                for key in (*((host, "in") for host in into), *((host, "out") for host in out)):
                    through[key] = through.get(key, 0) + nbytes
        return max(through.values(), default=0)

    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """Bytes sent, by (giver, taker), in ascending order of pairs."""
        total: dict[tuple[int, int], int] = {}
        for message in self.messages:
            pair = (message.giver, message.taker)
            total[pair] = total.get(pair, 0) + self.chunks[self.legs[message.chunk].chunk].nbytes
        return dict(sorted(total.items()))

    def to_json(self) -> dict[str, Any]:
        """What the digest is taken of; equal reductions give equal values."""
        return {
            "moves": [[m.name, m.src.dtype, m.src.partial, list(m.src.global_shape)] for m in self.moves],
            "chunks": [[[p.tensor, list(p.box.start), list(p.box.stop)] for p in chunk.parts] for chunk in self.chunks],
            "legs": [[leg.chunk, leg.rank, list(leg.addends)] for leg in self.legs],
            "messages": [[m.round, m.giver, m.taker, m.chunk] for m in self.messages],
        }


@dataclass(frozen=True, slots=True)
class _Way:
    """A box and the path of its running sum."""

    tensor: int
    box: Box
    visits: tuple[tuple[int, int], ...]
    """``(rank, addend)`` in the order in which they are joined."""


def plan_reduction(
    moves: Sequence[TensorMove],
    host_of: Mapping[int, str],
    chunk_bytes: int,
    missing: Missing = Missing.REFUSE,
    order: SumOrder = SumOrder.ASCENDING,
) -> Reduction:
    """The reduction of all of these moves, held as partial sums and sorted by name.

    Raises `PlanError` when an element that is wanted lacks an addend (unless it may be left), when boxes of one addend
    overlap, or when the dtype has no such reduction.
    """
    counts = tuple(_count_addends(move) for move in moves)
    router = _Router(host_of)
    ways: list[_Way] = []
    for number, (move, num_addends) in enumerate(zip(moves, counts, strict=True)):
        for box, holders, takers in _slices(move, num_addends, missing):
            is_ring = order is SumOrder.ANY or move.src.dtype in _INTEGERS
            for part, visits in router.route(box, holders, takers, is_ring=is_ring):
                ways.append(_Way(number, part, visits))
    chunks, legs, sendings = _cut(moves, ways, chunk_bytes)
    rounds = compute_rounds(sendings, host_of)
    messages = [Message(at, s.giver, s.taker, s.chunk) for at, s in zip(rounds, sendings, strict=True)]
    return Reduction(
        moves=tuple(moves),
        wholes=tuple(_whole_layout(move, number, ways) for number, move in enumerate(moves)),
        chunks=tuple(chunks),
        legs=tuple(legs),
        messages=tuple(sorted(messages, key=lambda message: (message.round, message.giver))),
        num_addends=counts,
        host_of=host_of,
    )


def _count_addends(move: TensorMove) -> int:
    src = move.src
    doing = f"{_DOING} of tensor {move.name!r}"
    op, dtype = src.partial, src.dtype
    integer = dtype in _INTEGERS
    if dtype.startswith(("float8", "float4")) or (op in _BITWISE and not integer) or (op == "avg" and integer):
        raise PlanError(
            f"{doing}: {op} of {dtype} values is not defined, expected a dtype with that arithmetic; cast the "
            "addends to "
            "a wider float first"
        )
    if op in _ORDERED and dtype.startswith("complex"):
        raise PlanError(f"{doing}: complex numbers have no {op}, expected an ordered dtype; sum them, or view as real")
    try:
        src.check_disjoint(move.name)
    except LayoutError as overlap:
        raise PlanError(
            f"{doing}: partial sums that overlap cannot be separated ({overlap}); give every addend as disjoint boxes"
        ) from overlap
    return max((shard.addend for shard in src.shards), default=-1) + 1


def _slices(
    move: TensorMove, num_addends: int, missing: Missing
) -> Iterator[tuple[Box, list[list[int]], tuple[int, ...]]]:
    """Box, ranks that hold each addend, ranks that want it."""
    # The two sides may differ in dtype; overlaps compare boxes only.
    overlap = compute_overlap(move.src, replace(move.dst, dtype=move.src.dtype), move.name)
    for part in overlap:
        holders: list[set[int]] = [set() for _ in range(num_addends)]
        for shard in part.givers:
            holders[shard.addend].add(int(shard.holder))
        lacking = [addend for addend, ranks in enumerate(holders) if not ranks]
        if not lacking:
            takers = tuple(sorted({int(shard.holder) for shard in part.takers}))
            yield part.box, [sorted(ranks) for ranks in holders], takers
        elif missing is Missing.REFUSE:
            raise PlanError(
                f"{_DOING} of tensor {move.name!r}: box {part.box} has {num_addends - len(lacking)} of {num_addends} "
                f"addends, expected all, no rank holds addend {lacking[0]}; give it on some rank"
            )


class _Router:
    """Chooses paths, and remembers what each rank already has to send."""

    def __init__(self, host_of: Mapping[int, str]) -> None:
        self._host_of = host_of
        self._load: dict[int, int] = {}

    def route(
        self, box: Box, holders: Sequence[Sequence[int]], takers: Sequence[int], *, is_ring: bool = False
    ) -> Iterator[tuple[Box, tuple[tuple[int, int], ...]]]:
        """Disjoint boxes that make up ``box``, each with the visits of its path; those of a ring may begin anywhere."""
        num = len(holders)
        orders = [[*range(num)]]
        if num == 2 or is_ring:
            lasts = [last for last in range(num - 1) if num == 2 or not {*holders[last]}.isdisjoint(takers)]
            orders += [[at % num for at in range(last + 1, last + 1 + num)] for last in lasts]
        ends = [(order, last) for order in orders for last in holders[order[-1]]]
        costs = [self._crossings(order, last, holders, takers) for order, last in ends]
        best = [end for end, cost in zip(ends, costs, strict=True) if cost == min(costs)]
        for (order, last), part in zip(best, _divide(box, len(best)), strict=False):
            visits = self._visits(order, last, holders)
            for (giver, _), (taker, _) in itertools.pairwise(visits):
                if giver != taker:
                    self._load[giver] = self._load.get(giver, 0) + part.size
            yield part, visits

    def _visits(self, order: Sequence[int], last: int, holders: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
        """Back from the end: each visit as near to the next one as can be."""
        visits = [(last, order[-1])]
        for addend in reversed(order[:-1]):
            rank = min(holders[addend], key=lambda r: (*self._distance(r, visits[-1][0]), self._load.get(r, 0), r))
            visits.append((rank, addend))
        return tuple(reversed(visits))

    def _crossings(
        self, order: Sequence[int], last: int, holders: Sequence[Sequence[int]], takers: Sequence[int]
    ) -> tuple[int, int]:
        """Hops between hosts and between ranks, on the path and from its end to the nearest taker."""
        visits = self._visits(order, last, holders)
        hops = [self._distance(a, b) for (a, _), (b, _) in itertools.pairwise(visits)]
        hops.append(min(self._distance(last, taker) for taker in takers))
        return sum(hop[0] for hop in hops), sum(hop[1] for hop in hops)

    def _distance(self, a: int, b: int) -> tuple[int, int]:
        return int(self._host_of[a] != self._host_of[b]), int(a != b)


def _divide(box: Box, num_parts: int) -> list[Box]:
    """Divide a box into at most that many boxes of nearly equal size, along its longest dim (the first of equals)."""
    if box.ndim == 0 or num_parts == 1:
        return [box]
    dim = max(range(box.ndim), key=lambda d: (box.shape[d], -d))
    num_parts = min(num_parts, box.shape[dim])
    cuts = [box.start[dim] + box.shape[dim] * n // num_parts for n in range(num_parts + 1)]
    return [box.with_interval(dim, low, high) for low, high in itertools.pairwise(cuts)]


def _whole_layout(move: TensorMove, number: int, ways: Sequence[_Way]) -> Layout:
    shards = []
    filled: dict[int, int] = {}
    for way in ways:
        if way.tensor == number:
            rank = way.visits[-1][0]
            shards.append(Shard(rank, way.box, filled.get(rank, 0)))
            filled[rank] = filled.get(rank, 0) + way.box.size
    return Layout(move.src.global_shape, tuple(shards), move.src.dtype)


def _cut(
    moves: Sequence[TensorMove], ways: Sequence[_Way], chunk_bytes: int
) -> tuple[list[Chunk], list[Leg], list[Sending]]:
    """Boxes with equal paths as chunks, their legs, and the sendings between these."""
    by_path: dict[tuple[tuple[int, int], ...], list[Part]] = {}
    for way in ways:
        itemsize = moves[way.tensor].src.itemsize_bytes
        by_path.setdefault(way.visits, []).append(Part(way.tensor, way.box, way.box.size * itemsize))
    chunks: list[Chunk] = []
    legs: list[Leg] = []
    sendings: list[Sending] = []
    for visits, parts in sorted(by_path.items(), key=lambda item: item[0]):
        # Falling item sizes keep every part aligned in its message.
        parts.sort(key=lambda part: -moves[part.tensor].src.itemsize_bytes)
        stays = [(rank, tuple(a for _, a in group)) for rank, group in itertools.groupby(visits, key=lambda v: v[0])]
        for chunk in _cut_parts(parts, chunk_bytes):
            after = -1
            for position, (rank, addends) in enumerate(stays):
                legs.append(Leg(len(chunks), rank, addends))
                if position + 1 < len(stays):
                    sendings.append(Sending(rank, stays[position + 1][0], len(legs) - 1, chunk.nbytes, after))
                    after = len(sendings) - 1
            chunks.append(chunk)
    return chunks, legs, sendings


def _cut_parts(parts: Sequence[Part], chunk_bytes: int) -> Iterator[Chunk]:
    """The parts one after the other, cut where a chunk is full; at least one element in each."""
    taken: list[Part] = []
    room = chunk_bytes
    for part in parts:
        itemsize = part.nbytes // part.box.size
        at = 0
        while at < part.box.size:
            count = min(part.box.size - at, room // itemsize)
            if count == 0 and not taken:
                count = 1
            if count:
                for box in boxes_of_flat_range(part.box, at, at + count):
                    taken.append(Part(part.tensor, box, box.size * itemsize))
                at += count
                room -= count * itemsize
            if at < part.box.size:
                yield Chunk(tuple(taken), sum(each.nbytes for each in taken))
                taken, room = [], chunk_bytes
    if taken:
        yield Chunk(tuple(taken), sum(each.nbytes for each in taken))


def _check(reduction: Reduction) -> None:
    """Raise `PlanError` unless every addend of every box goes in once, along legs that the messages join."""
    for number, legs in itertools.groupby(enumerate(reduction.legs), key=lambda item: item[1].chunk):
        path = [leg for _, leg in legs]
        for part in reduction.chunks[number].parts:
            move = reduction.moves[part.tensor]
            joined = sorted(addend for leg in path for addend in leg.addends)
            if joined != list(range(reduction.num_addends[part.tensor])):
                raise PlanError(
                    f"checking a sum: addends {joined} of {part.box} of tensor {move.name!r} are joined, expected each "
                    f"of {reduction.num_addends[part.tensor]} once; the reduction is damaged, plan again"
                )
            for leg in path:
                for addend in leg.addends:
                    if not any(
                        shard.addend == addend and shard.box.contains(part.box)
                        for shard in move.src.shards_of(leg.rank)
                    ):
                        raise PlanError(
                            f"checking a sum: rank {leg.rank} joins addend {addend} of {part.box} of tensor "
                            f"{move.name!r}, which it does not hold; the reduction is damaged, plan again"
                        )
    round_of: dict[int, int] = {}
    busy: set[tuple[int, int, bool]] = set()
    for message in reduction.messages:
        number = message.chunk
        ends = {(message.round, message.giver, True), (message.round, message.taker, False)}
        early = reduction.continues(number) and round_of.get(number - 1, message.round) >= message.round
        if (
            reduction.ends(number)
            or (reduction.legs[number].rank, reduction.legs[number + 1].rank) != (message.giver, message.taker)
            or early
            or ends & busy
        ):
            raise PlanError(
                f"checking a sum: the message of leg {number} in round {message.round} from rank {message.giver} to "
                f"{message.taker} does not join two legs in their order; the reduction is damaged, plan again"
            )
        busy |= ends
        round_of[number] = message.round
    if len(round_of) != len(reduction.messages) or len(round_of) != len(reduction.legs) - len(reduction.chunks):
        raise PlanError(
            f"checking a sum: {len(reduction.messages)} messages join {len(reduction.legs)} legs of "
            f"{len(reduction.chunks)} chunks, expected one between each two legs; plan again"
        )
