"""Stand-ins give and take what the others expect, whoever they are."""

from __future__ import annotations

import random

import pytest

from remesh.carried.mpi.calls.table import Kind
from remesh.carried.mpi.lower.open_collectives import call_of, pack_told, unpack_told
from remesh.carried.mpi.lower.real_collectives import may_end_early
from remesh.carried.mpi.lower.stand_ins import GATE, CallShape, ToldCall, plan_stand_in

_EXTENT = 8


def _shape(kind: Kind, rank: int, counts: tuple[int, ...]) -> CallShape:
    """What a member asks for where all have data; of the uneven kinds each has its count, of the others the first."""
    size, each = len(counts), _EXTENT * counts[0]
    if kind == Kind.ALLGATHERV:
        return CallShape(kind, 0, 0, 0, counts[rank], sum(counts), (), counts)
    if kind == Kind.REDUCE_SCATTER:
        return CallShape(kind, 0, 1, 2, _EXTENT * sum(counts), _EXTENT * counts[rank], counts, ())
    if kind == Kind.ALLREDUCE:
        return CallShape(kind, 0, 1, 2, each, each)
    return CallShape(kind, 0, 0, 0, each * (size if kind == Kind.ALLTOALL else 1), each * size)


@pytest.mark.parametrize("kind", [Kind.ALLGATHER, Kind.ALLGATHERV, Kind.ALLTOALL, Kind.ALLREDUCE, Kind.REDUCE_SCATTER])
def test_what_any_member_has_asked_for_says_what_every_other_one_asks_for(kind: Kind) -> None:
    order = random.Random(int(kind))
    for _ in range(60):
        counts = tuple(order.choice([1, 5, 40, 4096]) for _ in range(order.randrange(2, 6)))
        for rank in range(len(counts)):
            told = _shape(kind, order.randrange(len(counts)), counts)
            assert plan_stand_in(told, rank) == _shape(kind, rank, counts)


@pytest.mark.parametrize("kind", list(Kind))
def test_what_may_end_before_all_have_entered_it_stands_behind_a_gate(kind: Kind) -> None:
    needs_all = (Kind.ALLGATHER, Kind.ALLGATHERV, Kind.ALLTOALL, Kind.ALLREDUCE, Kind.REDUCE_SCATTER)
    data = _shape(kind, 0, (3, 1, 2))
    assert may_end_early(call_of(data, b""), 3) == (kind not in (*needs_all, Kind.BARRIER))
    assert not may_end_early(call_of(data, b""), 1)
    # Who gets nothing, or nothing of some other one, needs not wait for that.
    for counts in ((0, 0, 0), (3, 0, 2)):
        lacks = _shape(kind, 0, counts)
        if kind in (Kind.ALLGATHERV, Kind.REDUCE_SCATTER) or (kind in needs_all and not any(counts)):
            assert may_end_early(call_of(lacks, b""), 3)


def test_a_gate_needs_nothing_of_anybody() -> None:
    assert plan_stand_in(GATE, 3) == GATE and not may_end_early(call_of(GATE, b""), 9)


def test_what_is_told_comes_back() -> None:
    told = [
        ToldCall(0, 0, 3, 7, 2, CallShape(Kind.BCAST, 1, 0, 0, 9, 0)),
        ToldCall(1 << 60, 4, 2, 1, 5, CallShape(Kind.ALLTOALLV, 0, 0, 0, 3, 4, (1, 2), (4, 0))),
    ]
    assert unpack_told(pack_told(told[:1]) + pack_told(told[1:])) == told
    assert unpack_told(b"") == []
