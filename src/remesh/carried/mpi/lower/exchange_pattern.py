"""Exchange pattern of a small collective: the steps of each member, as point-to-point messages.

A step gives to a peer, or takes from one, so many of the blocks that a rank has; blocks are counted from its own on. A
rank that has done its steps is through, whoever else is not: what it gave is a message, and what it has is its own. So
at a checkpoint nobody waits for a member that has not come.

*Recursive doubling*, for all to have the fold of everybody's operand, and for barriers. Let ``P`` be the largest power
of two that is not more than the size, and ``E`` the rest:

1. Of the first ``2 E`` ranks each even one gives its operand to its right neighbour, which folds the two. ``P`` ranks
   are left, each with a block of one or two neighbours; they are counted anew, in order.
2. In round ``k`` two ranks whose new numbers differ by ``2 ** k`` exchange what they have. Both fold it the same way
   around, the lower block first, so the blocks are neighbours, in order, and twice as long after it.
3. Each even one of the first ``2 E`` ranks takes the result from its neighbour.

So the fold is in order of ranks, and is associated in one way for each size: the bits of a sum of floating-point
numbers depend on neither library, network nor placement. It takes ``log2 P`` latencies, two more where ``E`` is not 0,
and all of an operand travels each time: this is for small operands.

*A binomial tree*, for what has a root. Ranks are counted from the root on. The parent of ``v`` is ``v`` without its
lowest bit; its children are ``v + 2 ** k`` for all ``2 ** k`` below that bit. The descendants of ``v`` follow it, so
what is gathered from them, or scattered to them, is one run of blocks.

*Doubling of distances*, for scans: in round ``k`` each rank gives what it has to the one ``2 ** k`` above, and folds
what comes from as far below. Without the own operand all is first moved one rank up.

Each step is one wire message, PART (communicator, clock: which of its collectives), which waits for the step that takes
it or is taken at once. Parts of one peer are taken in the order in which it gave them.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", International
Journal of High Performance Computing Applications 19(1), 2005, section 4; Hillis and Steele, "Data parallel
algorithms", Communications of the ACM 29(12), 1986.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from remesh.carried.mpi.calls.table import Kind

SMALL_BYTES: Final = 2048
"""Limit of operands that all members get; longer ones go the real MPI's way, which cuts them and sends less."""
_HEAD: Final = struct.Struct("<ii")
"""Number of members; number of blocks that this rank has room for: as ``_engine_small.c`` reads it."""
_STEP: Final = struct.Struct("<iiii")
"""Action, world rank of the peer, first block, number of blocks."""


class Do(enum.IntEnum):
    """The action of a step on the blocks of this rank."""

    GIVE = 0  # send them
    FOLD_BEFORE = 1  # take the peer's and put it before
    FOLD_AFTER = 2  # take the peer's and put it behind
    TAKE = 3  # take the peer's instead of it
    ROTATE = 4  # no message: the blocks from `first` on come to the front, those before them behind


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """One message of the exchange."""

    do: Do
    peer: int = 0  # world rank
    first: int = 0  # block
    count: int = 1  # blocks


def plan_doubling(ranks: Sequence[int], rank: int) -> tuple[ExchangeStep, ...]:
    """Steps of the member ``rank`` of a communicator of these world ranks, in order. No peer is taken from twice.

    >>> [(step.do.name, step.peer) for step in plan_doubling([4, 5, 6], 0)]
    [('GIVE', 5), ('TAKE', 5)]
    >>> [(step.do.name, step.peer) for step in plan_doubling([4, 5, 6], 1)]
    [('FOLD_BEFORE', 4), ('GIVE', 6), ('FOLD_AFTER', 6), ('GIVE', 4)]
    """
    size = len(ranks)
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    is_paired = rank < 2 * extra
    if is_paired and rank % 2 == 0:
        neighbour = ranks[rank + 1]
        return ExchangeStep(Do.GIVE, neighbour), ExchangeStep(Do.TAKE, neighbour)
    steps = [ExchangeStep(Do.FOLD_BEFORE, ranks[rank - 1])] if is_paired else []
    number, distance = rank // 2 if is_paired else rank - extra, 1
    while distance < power:
        other = number ^ distance
        peer = ranks[2 * other + 1 if other < extra else other + extra]
        steps += [ExchangeStep(Do.GIVE, peer), ExchangeStep(Do.FOLD_BEFORE if other < number else Do.FOLD_AFTER, peer)]
        distance *= 2
    if is_paired:
        steps.append(ExchangeStep(Do.GIVE, ranks[rank - 1]))
    return tuple(steps)


@dataclass(frozen=True, slots=True)
class _RootedPlace:
    """A member's place in the tree of a root. Members are counted from the root on."""

    members: tuple[int, ...]  # world ranks, the root first
    at: int

    @property
    def num_below(self) -> int:
        """Number of blocks of this member and its descendants."""
        lowest = self.at & -self.at or len(self.members)
        return min(lowest, len(self.members) - self.at)

    @property
    def parent(self) -> int | None:
        """World rank of the parent; None for the root."""
        return self.members[self.at & (self.at - 1)] if self.at else None

    @property
    def children(self) -> list[tuple[int, int, int]]:
        """World rank, distance and number of blocks of each, the nearest first."""
        distances = (1 << k for k in range(self.num_below.bit_length()) if 1 << k < self.num_below)
        return [(self.members[self.at + d], d, _RootedPlace(self.members, self.at + d).num_below) for d in distances]


def plan_bcast(place: _RootedPlace) -> tuple[ExchangeStep, ...]:
    """Steps that bring the root's block to all."""
    down = [ExchangeStep(Do.GIVE, child) for child, _, _ in reversed(place.children)]
    return (*_of_parent(Do.TAKE, place), *down)


def plan_reduce(place: _RootedPlace) -> tuple[ExchangeStep, ...]:
    """Steps that fold all blocks at the root."""
    up = [ExchangeStep(Do.FOLD_AFTER, child) for child, _, _ in place.children]
    return (*up, *_of_parent(Do.GIVE, place))


def plan_gather(place: _RootedPlace, root: int) -> tuple[ExchangeStep, ...]:
    """Steps that bring all blocks to the root, in order of ranks."""
    up = [ExchangeStep(Do.TAKE, child, distance, count) for child, distance, count in place.children]
    size = len(place.members)
    turn = [ExchangeStep(Do.ROTATE, 0, size - root, size)] if place.parent is None and root else []
    return (*up, *_of_parent(Do.GIVE, place, place.num_below), *turn)


def plan_scatter(place: _RootedPlace, root: int) -> tuple[ExchangeStep, ...]:
    """Steps that bring to each member its block of the root's."""
    size = len(place.members)
    turn = [ExchangeStep(Do.ROTATE, 0, root, size)] if place.parent is None and root else []
    down = [ExchangeStep(Do.GIVE, child, distance, count) for child, distance, count in reversed(place.children)]
    return (*turn, *_of_parent(Do.TAKE, place, place.num_below), *down)


def _of_parent(do: Do, place: _RootedPlace, count: int = 1) -> list[ExchangeStep]:
    return [] if place.parent is None else [ExchangeStep(do, place.parent, 0, count)]


def plan_scan(ranks: Sequence[int], rank: int) -> tuple[ExchangeStep, ...]:
    """Steps after which each member has the fold of all up to its own operand.

    >>> [(step.do.name, step.peer) for step in plan_scan([4, 5, 6], 2)]
    [('FOLD_BEFORE', 5), ('FOLD_BEFORE', 4)]
    """
    steps, distance = [], 1
    while distance < len(ranks):
        if rank + distance < len(ranks):
            steps.append(ExchangeStep(Do.GIVE, ranks[rank + distance]))
        if rank >= distance:
            steps.append(ExchangeStep(Do.FOLD_BEFORE, ranks[rank - distance]))
        distance *= 2
    return tuple(steps)


def plan_exscan(ranks: Sequence[int], rank: int) -> tuple[ExchangeStep, ...]:
    """Steps of `plan_scan` without the own operand; the first member keeps its operand, which nobody looks at."""
    moved = [ExchangeStep(Do.GIVE, ranks[rank + 1])] if rank + 1 < len(ranks) else []
    if rank:
        moved.append(ExchangeStep(Do.TAKE, ranks[rank - 1]))
    return (*moved, *(plan_scan(ranks[1:], rank - 1) if rank else ()))


def plan_small(kind: Kind, members: Sequence[int], rank: int, root: int) -> tuple[ExchangeStep, ...]:
    """Steps of the member ``rank`` in a collective with this root, both counted in the communicator."""
    place = _RootedPlace((*members[root:], *members[:root]), (rank - root) % len(members))
    match kind:
        case Kind.BCAST:
            return plan_bcast(place)
        case Kind.REDUCE:
            return plan_reduce(place)
        case Kind.GATHER:
            return plan_gather(place, root)
        case Kind.SCATTER:
            return plan_scatter(place, root)
        case Kind.SCAN:
            return plan_scan(members, rank)
        case Kind.EXSCAN:
            return plan_exscan(members, rank)
        case _:
            return plan_doubling(members, rank)


def pack_plan(num_members: int, steps: Sequence[ExchangeStep]) -> bytes:
    """The steps of a member, for the engine."""
    num_blocks = max((step.first + step.count if step.do is not Do.ROTATE else step.count for step in steps), default=1)
    packed = (_STEP.pack(step.do, step.peer, step.first, step.count) for step in steps)
    return _HEAD.pack(num_members, num_blocks) + b"".join(packed)
