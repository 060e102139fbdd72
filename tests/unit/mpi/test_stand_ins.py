"""Stand-ins give and take what the others expect, whoever they are."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from remesh.mpi.calls.table import Kind
from remesh.mpi.lower.open_collectives import pack_told, unpack_told
from remesh.mpi.lower.stand_ins import CallShape, ToldCall, plan_stand_in

_EXTENT = 8


def _even(kind: Kind, rank: int, size: int, root: int, each: int) -> CallShape:
    send, receive = {
        Kind.BCAST: (each if rank == root else 0, 0 if rank == root else each),
        Kind.GATHER: (each, each * size if rank == root else 0),
        Kind.SCATTER: (each * size if rank == root else 0, each),
        Kind.ALLGATHER: (each, each * size),
        Kind.ALLTOALL: (each * size, each * size),
        Kind.REDUCE: (each, each if rank == root else 0),
    }.get(kind, (each, each))
    return CallShape(kind, root, 1, 2, send, receive)


def _uneven(kind: Kind, rank: int, root: int, table: list[list[int]]) -> CallShape:
    """`table[i][j]`: bytes from i to j."""
    size = len(table)
    row, column = tuple(table[rank]), tuple(line[rank] for line in table)
    if kind == Kind.ALLTOALLV:
        return CallShape(kind, root, 0, 0, sum(row), sum(column), row, column)
    if kind == Kind.GATHERV:
        taken = tuple(line[root] for line in table) if rank == root else ()
        return CallShape(kind, root, 0, 0, table[rank][root], sum(taken), (), taken)
    if kind == Kind.SCATTERV:
        given = tuple(table[root]) if rank == root else ()
        return CallShape(kind, root, 0, 0, sum(given), table[root][rank], given, ())
    counts = tuple(table[i][i] for i in range(size))
    if kind == Kind.ALLGATHERV:
        return CallShape(kind, root, 0, 0, counts[rank], sum(counts), (), counts)
    return CallShape(kind, root, 1, 2, _EXTENT * sum(counts), _EXTENT * counts[rank], counts, ())


def _check_pairs(kind: Kind, shapes: list[CallShape], root: int) -> None:
    """What one gives to another is what that one takes from it."""
    for one, shape in enumerate(shapes):
        if kind == Kind.GATHERV and one != root:
            assert shape.send_bytes == shapes[root].receive_counts[one]
        if kind == Kind.SCATTERV and one != root:
            assert shape.receive_bytes == shapes[root].send_counts[one]
        for other in range(len(shapes)) if kind == Kind.ALLTOALLV else ():
            assert shape.send_counts[other] == shapes[other].receive_counts[one]


@pytest.mark.parametrize("kind", list(Kind))
def test_with_stand_ins_a_collective_fits_together_whoever_has_begun_it(kind: Kind) -> None:
    order = random.Random(int(kind))
    for _ in range(60):
        size = order.randrange(2, 6)
        root, each = order.randrange(size), order.choice([0, 8, 4096])
        each = 0 if kind == Kind.BARRIER else each
        table = [[order.choice([0, 1, 5, 40]) for _ in range(size)] for _ in range(size)]
        is_uneven = kind in (Kind.GATHERV, Kind.SCATTERV, Kind.ALLGATHERV, Kind.ALLTOALLV, Kind.REDUCE_SCATTER)
        make: Callable[[int], CallShape] = (
            (lambda rank, r=root, t=table: _uneven(kind, rank, r, t))
            if is_uneven
            else (lambda rank, r=root, n=size, e=each: _even(kind, rank, n, r, e))
        )
        have = set(order.sample(range(size), order.randrange(1, size)))
        told = {rank: make(rank) for rank in have}
        shapes = [told[rank] if rank in have else plan_stand_in(told, rank, size) for rank in range(size)]
        _check_pairs(kind, shapes, root)
        for rank in set(range(size)) - have:
            if not is_uneven or kind in (Kind.ALLGATHERV, Kind.REDUCE_SCATTER):
                assert shapes[rank] == make(rank), "all lengths follow from what any member has asked for"


def test_what_is_told_comes_back() -> None:
    told = [
        ToldCall(0, 0, 3, 7, 2, CallShape(Kind.BCAST, 1, 0, 0, 9, 0)),
        ToldCall(1 << 60, 4, 2, 1, 5, CallShape(Kind.ALLTOALLV, 0, 0, 0, 3, 4, (1, 2), (4, 0))),
    ]
    assert unpack_told(pack_told(told[:1]) + pack_told(told[1:])) == told
    assert unpack_told(b"") == []
