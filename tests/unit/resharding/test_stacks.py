"""Tensors that are alike are planned as one, and every element of each still comes where it is wanted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, strategies as st

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout, Shard
from remesh.layout.from_torch import Piece
from remesh.resharding import TensorMove, compute_missing_boxes, plan_reshard
from remesh.resharding.model.tasks import Missing, stack_moves
from remesh.resharding.planning.transfer import Transfer, plan_stacked
from remesh.resharding.running.describe import describe_all, moves_of
from tests.unit.resharding.cases import expected_of, host_maps, move_lists, ranks_of, simulate


@st.composite
def repeated_moves(draw: st.DrawFn, complete: bool = True) -> list[TensorMove]:
    """Some kinds of moves, each for some tensors, under names in any order."""
    kinds = draw(move_lists(complete))
    of = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8))
    names = draw(st.permutations([f"t{number}" for number in range(len(of))]))
    return [TensorMove(name, kind.src, kind.dst) for name, kind in zip(names, of, strict=True)]


def arrivals_of(transfer: Transfer) -> dict[tuple[str, int], npt.NDArray[np.int64]]:
    """What every rank has of every tensor after the transfer, as `simulate` tells it of the tensors of a plan."""
    found = {}
    for (move, rank), values in simulate(transfer.plan).items():
        names = transfer.names_of(move)
        for number, of_one in enumerate(np.split(values, len(names))):
            came = of_one >= 0
            found[names[number], rank] = np.where(came, of_one - number * of_one.size, -1)
            assert (found[names[number], rank][came] >= 0).all(), "an element came from another tensor"
    return found


@given(repeated_moves(), st.data())
def test_every_element_of_every_tensor_comes_to_whoever_wants_it(moves: list[TensorMove], data: st.DataObject) -> None:
    hosts = data.draw(host_maps(moves))
    transfer = plan_stacked(moves, hosts, {"chunk_bytes": data.draw(st.sampled_from([64, 100, 1 << 22]))})
    assert transfer.num_tensors == len(moves)
    assert len(transfer.plan.moves) == len({(id(move.src), id(move.dst)) for move in moves})
    arrived = arrivals_of(transfer)
    for move in moves:
        for rank in move.dst.holders:
            assert arrived[move.name, int(rank)].tolist() == expected_of(move, int(rank)).tolist(), move.name


@given(repeated_moves(complete=False), st.data())
def test_what_nobody_holds_is_told_of_the_tensors_themselves(moves: list[TensorMove], data: st.DataObject) -> None:
    hosts = data.draw(host_maps(moves))
    missing = compute_missing_boxes(sorted(moves, key=lambda move: move.name))
    assert plan_stacked(moves, hosts, {"missing": Missing.LEAVE}).missing == missing
    if missing:
        with pytest.raises(PlanError) as alone:
            plan_reshard(moves, hosts)
        with pytest.raises(PlanError) as stacked:
            plan_stacked(moves, hosts, {})
        assert str(stacked.value) == str(alone.value)


@given(repeated_moves(), st.sampled_from([64, 640, 1 << 16]))
def test_a_stack_keeps_to_the_cap_on_staging(moves: list[TensorMove], cap: int) -> None:
    hosts = {rank: f"h{rank}" for rank in ranks_of(moves)}
    try:
        transfer = plan_stacked(moves, hosts, {"max_staging_bytes": cap})
    except PlanError:
        return
    assert transfer.staging_bytes <= cap


def test_tensors_that_are_kept_in_other_dtypes_stand_apart_although_the_same_travels() -> None:
    def kept(dtype: torch.dtype) -> Piece:
        return Piece(torch.zeros(4, dtype=dtype), (4,), (Shard(0, Box((0,), (4,))),))

    dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32}
    give = {name: kept(dtype) for name, dtype in dtypes.items()}
    take = {name: kept(torch.bfloat16) for name in dtypes}
    moves = moves_of([describe_all(give, {}), describe_all({}, take)])
    assert {move.src.dtype for move in moves} == {"bfloat16"}
    assert stack_moves(moves)[1] == {"a": ("a", "c")}


def test_partial_sums_stand_by_themselves() -> None:
    box = Box((0,), (4,))
    partial = Layout((4,), (Shard(0, box), Shard(1, box, addend=1)), "int32", "sum")
    whole = Layout((4,), (Shard(1, box),), "int32")
    stacked, alike = stack_moves([TensorMove(name, partial, whole) for name in ("v", "w")])
    assert [move.name for move in stacked] == ["v", "w"] and not alike
