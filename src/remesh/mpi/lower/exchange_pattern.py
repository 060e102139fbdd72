"""Whom does each rank give to and take from, so that all have the fold of everybody's operand, soon and all the same?

*Recursive doubling*. Let ``P`` be the largest power of two that is not more than the size, and ``E`` the rest:

1. Of the first ``2 E`` ranks each even one gives its operand to its right neighbour, which folds the two. ``P`` ranks
   are left, each with a block of one or two neighbours; they are counted anew, in order.
2. In round ``k`` two ranks whose new numbers differ by ``2 ** k`` exchange what they have. Both fold it the same way
   around, the lower block first, so the blocks are neighbours, in order, and twice as long after it.
3. Each even one of the first ``2 E`` ranks takes the result from its neighbour.

Each step is one wire message, PART (communicator, clock: which of its collectives), which waits for the step that takes
it or is taken at once. No peer is taken from twice in a collective, so communicator, clock and source name a part. All
members have entered before anyone is through, so where nobody is inside a collective no part is on its way or waits.

So the fold is in order of ranks, and is associated in one way for each size: the bits of a sum of floating-point
numbers depend on neither library, network nor placement. With operands of no bytes it is a barrier: no rank ends before
all have begun. It takes ``log2 P`` latencies, two more where ``E`` is not 0, and all of an operand travels each time:
this is for small operands.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", International
Journal of High Performance Computing Applications 19(1), 2005, section 4.5.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SMALL_BYTES: Final = 2048
"""Longer operands go the real MPI's way: from some size on it cuts them, and sends less."""
_STEP: Final = struct.Struct("<ii")
"""What to do, world rank of the peer: as ``_engine_doubling.c`` reads it."""


class Do(enum.IntEnum):
    """What a step does with this rank's fold so far."""

    GIVE = 0  # send it
    FOLD_BEFORE = 1  # take the peer's and put it before
    FOLD_AFTER = 2  # take the peer's and put it behind
    TAKE = 3  # take the peer's instead of it


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """One message."""

    do: Do
    peer: int  # world rank


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


def pack_plan(members: Sequence[int], rank: int) -> bytes:
    """The steps of world rank ``rank`` in a communicator, for the engine."""
    return b"".join(_STEP.pack(step.do, step.peer) for step in plan_doubling(members, members.index(rank)))
