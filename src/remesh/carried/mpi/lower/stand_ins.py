"""Stand-in operands for collectives that other ranks are inside of when all are about to leave: data that is not read.

MPI cannot be finalised, nor even left, while collectives are under way, and they cannot be cancelled. So where a job
stops, each rank takes part in what others have begun and it has not: as a *stand-in*, with operands of the lengths that
the others expect. Only what needs the data of all members has begun then, so that one's lengths say those of all; what
may end earlier has not passed its gate, which is a barrier.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from remesh.carried.mpi.calls.table import Kind


@dataclass(frozen=True, slots=True)
class CallShape:
    """The arguments of a collective as one member calls it, without the data."""

    kind: int
    root: int  # rank in the communicator
    op: int
    type: int
    send_bytes: int
    receive_bytes: int
    send_counts: tuple[int, ...] = ()  # bytes for each rank; elements for REDUCE_SCATTER
    receive_counts: tuple[int, ...] = ()  # bytes from each rank


@dataclass(frozen=True, slots=True)
class ToldCall:
    """A collective that a rank has begun, as it tells all others."""

    comm: int
    first: int  # world rank of the communicator's rank 0: disjoint groups may have one number
    num_members: int
    number: int  # on the communicator
    rank: int  # world rank of who tells
    shape: CallShape


GATE: Final = CallShape(Kind.BARRIER, 0, 0, 0, 0, 0)
"""The call that stands before a collective which may end on a member before another one has entered it."""


def plan_stand_in(told: CallShape, rank: int) -> CallShape:
    """The call of the member ``rank``, given the call of another one.

    >>> plan_stand_in(CallShape(Kind.ALLGATHERV, 0, 0, 0, 5, 8, receive_counts=(5, 3)), 1).send_bytes
    3
    """
    if told.kind == Kind.ALLGATHERV:
        return replace(told, send_bytes=told.receive_counts[rank])
    if told.kind == Kind.REDUCE_SCATTER:
        bytes_of_one = told.send_bytes // sum(told.send_counts)
        return replace(told, receive_bytes=bytes_of_one * told.send_counts[rank])
    return told
