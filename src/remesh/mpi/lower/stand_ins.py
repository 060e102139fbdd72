"""What does a rank give to a collective that others stand in, when all are about to leave? Data that nobody reads.

MPI cannot be finalised, nor even left, while collectives are under way, and they cannot be cancelled. So where a job
stops, each rank takes part in what others have begun and it has not: as a *stand-in*, with operands of the lengths that
the others expect. What those have asked for says all lengths; between two stand-ins nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from remesh.mpi.calls.table import Kind


@dataclass(frozen=True, slots=True)
class CallShape:
    """A collective as one member asks for it, without the data."""

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
    """What a rank tells all others that it has begun."""

    comm: int
    first: int  # world rank of the communicator's rank 0: disjoint groups may have one number
    num_members: int
    number: int  # on the communicator
    rank: int  # world rank of who tells
    shape: CallShape


def plan_stand_in(told: Mapping[int, CallShape], rank: int, size: int) -> CallShape:
    """What the member ``rank`` of ``size`` asks for, given what at least one other member has asked for, by rank.

    >>> root = CallShape(Kind.SCATTERV, 0, 0, 0, 5, 2, send_counts=(2, 3))
    >>> plan_stand_in({0: root}, 1, 2).receive_bytes
    3
    """
    like = replace(next(iter(told.values())), send_bytes=0, receive_bytes=0, send_counts=(), receive_counts=())
    if like.kind in _UNEVEN:
        return _uneven(like, told, rank, size)
    given = max(one.send_bytes for one in told.values())
    taken = max(one.receive_bytes for one in told.values())
    is_root = rank == like.root
    match like.kind:
        case Kind.BCAST:
            whole = max(given, taken)
            return replace(like, send_bytes=whole if is_root else 0, receive_bytes=0 if is_root else whole)
        case Kind.GATHER:
            each = max(given, taken // size)
            return replace(like, send_bytes=each, receive_bytes=each * size if is_root else 0)
        case Kind.SCATTER:
            each = max(taken, given // size)
            return replace(like, send_bytes=each * size if is_root else 0, receive_bytes=each)
        case Kind.REDUCE:
            return replace(like, send_bytes=given, receive_bytes=given if is_root else 0)
        case _:  # all members give as much as each other, and take as much
            return replace(like, send_bytes=given, receive_bytes=taken)


_UNEVEN = (Kind.GATHERV, Kind.SCATTERV, Kind.ALLGATHERV, Kind.ALLTOALLV, Kind.REDUCE_SCATTER)


def _uneven(like: CallShape, told: Mapping[int, CallShape], rank: int, size: int) -> CallShape:
    any_one, root = next(iter(told.values())), told.get(like.root)
    nothing = (0,) * size
    match like.kind:
        case Kind.GATHERV if rank == like.root:
            return _of_counts(like, (), [told[i].send_bytes if i in told else 0 for i in range(size)])
        case Kind.GATHERV:
            return replace(like, send_bytes=root.receive_counts[rank] if root else 0)
        case Kind.SCATTERV if rank == like.root:
            return _of_counts(like, [told[i].receive_bytes if i in told else 0 for i in range(size)], ())
        case Kind.SCATTERV:
            return replace(like, receive_bytes=root.send_counts[rank] if root else 0)
        case Kind.ALLGATHERV:
            counts = any_one.receive_counts
            return replace(_of_counts(like, (), counts), send_bytes=counts[rank])
        case Kind.ALLTOALLV:
            gives = [told[i].receive_counts[rank] if i in told else 0 for i in range(size)]
            takes = [told[i].send_counts[rank] if i in told else 0 for i in range(size)]
            return _of_counts(like, gives, takes)
        case _:
            shares = any_one.send_counts or nothing
            each = any_one.send_bytes // max(sum(shares), 1)
            return replace(
                like, send_bytes=any_one.send_bytes, receive_bytes=each * shares[rank], send_counts=tuple(shares)
            )


def _of_counts(like: CallShape, gives: Sequence[int], takes: Sequence[int]) -> CallShape:
    return replace(
        like,
        send_bytes=sum(gives),
        receive_bytes=sum(takes),
        send_counts=tuple(gives),
        receive_counts=tuple(takes),
    )
