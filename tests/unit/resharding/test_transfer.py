"""Transfers keep their memory, sums are complete, casts travel narrow: the pure half of the executor."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout, Mesh, Partial, Placement, Replicate, Shard, Split, layout_from_placements
from remesh.layout.dtypes import ITEMSIZE_BYTES
from remesh.resharding import TensorMove, Timing, plan_reshard
from remesh.resharding.model.program import Message
from remesh.resharding.model.tasks import SumOrder, travelling_dtype
from remesh.resharding.planning.rank_steps import Act, Step, compute_peak_bytes, compute_steps
from remesh.resharding.planning.reduction import Reduction, plan_reduction
from remesh.resharding.planning.transfer import Transfer, plan_transfer
from remesh.resharding.running.telemetry import merge_timings
from tests.unit.resharding.cases import host_maps, move_lists


@given(st.sampled_from(sorted(ITEMSIZE_BYTES)), st.sampled_from(sorted(ITEMSIZE_BYTES)))
def test_the_narrower_dtype_travels_or_none(held: str, wanted: str) -> None:
    travelling = travelling_dtype(held, wanted)
    if held == wanted:
        assert travelling == held
    elif travelling is not None:
        assert travelling in (held, wanted)
        assert ITEMSIZE_BYTES[travelling] == min(ITEMSIZE_BYTES[held], ITEMSIZE_BYTES[wanted])
    assert travelling_dtype("bool", "int8") is travelling_dtype("int32", "uint8") is None
    assert travelling_dtype("float32", "complex64") is travelling_dtype("int64", "float64") is None


def test_a_move_between_dtypes_is_a_move_of_what_travels() -> None:
    box = Box((0,), (4,))
    wide, narrow = (Layout((4,), (Shard(rank, box),), dtype) for rank, dtype in ((0, "float32"), (1, "bfloat16")))
    for src, dst in ((wide, narrow), (narrow, wide)):
        move = TensorMove("w", src, dst)
        assert move.src.dtype == move.dst.dtype == "bfloat16"
        assert plan_reshard([move], {0: "a", 1: "b"}).lower_bound_bytes == 8
    with pytest.raises(PlanError, match=r"'w'.*float32.*int8"):
        TensorMove("w", wide, dataclasses.replace(narrow, dtype="int8"))


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Message], list[Message]]:
    """What one rank gives and takes: at most one of each in a round, some of it relayed."""
    num_rounds = draw(st.integers(1, 12))
    gives: list[Message] = []
    takes: list[Message] = []
    for round_ in range(num_rounds):
        # Taken chunks count from 100; what is given is own (its round) or was taken before.
        origins = [take.chunk for take in takes]
        if draw(st.booleans()):
            takes.append(Message(round_, 1, 0, 100 + round_))
        if draw(st.booleans()):
            own = st.just(round_)
            gives.append(Message(round_, 0, 1, draw(st.one_of(own, st.sampled_from(origins)) if origins else own)))
    return gives, takes


@given(programs(), st.integers(1, 5))
def test_steps_post_before_they_take_and_take_before_they_pass_on(
    program: tuple[list[Message], list[Message]], window: int
) -> None:
    gives, takes = program
    steps = compute_steps(gives, takes, {message.chunk: message.round for message in takes}, window)
    by_act = {act: [step.message for step in steps if step.act is act] for act in Act}
    assert by_act[Act.POST] == takes == sorted(by_act[Act.TAKE], key=lambda message: message.round)
    assert by_act[Act.GIVE] == by_act[Act.SETTLE] == gives
    order = {(step.act, id(step.message)): at for at, step in enumerate(steps)}
    for message in takes:
        assert order[Act.POST, id(message)] < order[Act.TAKE, id(message)]
    for message in gives:
        assert order[Act.GIVE, id(message)] < order[Act.SETTLE, id(message)]
        for take in takes:
            if take.chunk == message.chunk:
                assert order[Act.TAKE, id(take)] < order[Act.GIVE, id(message)]
            # Receives up to a round are posted before it is given: no peer waits for a busy one.
            if take.round <= message.round:
                assert order[Act.POST, id(take)] < order[Act.GIVE, id(message)]
    for first, second, acts in ((Act.POST, Act.TAKE, takes), (Act.GIVE, Act.SETTLE, gives)):
        open_ = 0
        for step in steps:
            open_ += (step.act is first) - (step.act is second)
            assert open_ <= window, acts


@given(programs(), st.integers(1, 5), st.data())
def test_the_peak_is_that_of_a_machine_which_counts_buffers(
    program: tuple[list[Message], list[Message]], window: int, data: st.DataObject
) -> None:
    gives, takes = program
    steps = compute_steps(gives, takes, {message.chunk: message.round for message in takes}, window)
    sizes = [data.draw(st.integers(1, 9)) for _ in range(120)]
    relayed = {take.chunk: [take.chunk] * sum(give.chunk == take.chunk for give in gives) for take in takes}
    relayed = {chunk: uses for chunk, uses in relayed.items() if uses}
    assert compute_peak_bytes(steps, sizes, relayed) == _count_buffers(steps, sizes, relayed)


def _count_buffers(steps: tuple[Step, ...], sizes: list[int], relayed: dict[int, list[int]]) -> int:
    """The dumb twin: every buffer is an object, and lives while anything refers to it."""
    posted: dict[Message, object] = {}
    sent: deque[object] = deque()
    kept: dict[int, object] = {}
    left = {chunk: len(uses) for chunk, uses in relayed.items()}
    size_of: dict[int, int] = {}
    peak = 0
    for step in steps:
        chunk = step.message.chunk
        if step.act is Act.POST:
            posted[step.message] = buffer = object()
            size_of[id(buffer)] = sizes[chunk]
        elif step.act is Act.TAKE:
            buffer = posted.pop(step.message)
            if chunk in left:
                kept[chunk] = buffer
        elif step.act is Act.GIVE:
            if chunk in left:
                left[chunk] -= 1
                buffer = kept[chunk] if left[chunk] else kept.pop(chunk)
            else:
                buffer = object()
                size_of[id(buffer)] = sizes[chunk]
            sent.append(buffer)
        else:
            sent.popleft()
        alive = {id(each) for each in (*posted.values(), *sent, *kept.values())}
        peak = max(peak, sum(size_of[each] for each in alive))
    return peak


@given(st.data())
def test_no_rank_is_planned_to_stage_more_than_the_cap(data: st.DataObject) -> None:
    moves = data.draw(move_lists())
    hosts = data.draw(host_maps(moves))
    free = plan_transfer(moves, hosts, {"chunk_bytes": 256})
    cap = data.draw(st.integers(1, 2 * free.staging_bytes + 2))
    try:
        capped = plan_transfer(moves, hosts, {"max_staging_bytes": cap})
    except PlanError as error:
        assert f"max_staging_bytes is {cap}, too small" in str(error)
        assert cap < free.staging_bytes
        return
    assert capped.staging_bytes <= cap
    assert capped.plan.bytes_by_pair.keys() == free.plan.bytes_by_pair.keys() or capped.plan.chunks != free.plan.chunks


def test_a_window_of_no_messages_and_a_broken_cap_are_refused() -> None:
    move = TensorMove("x", *(Layout((64,), (Shard(rank, Box((0,), (64,))),), "float32") for rank in (0, 1)))
    plan = plan_reshard([move], {0: "a", 1: "b"})
    assert Transfer(plan).staging_bytes == 256
    with pytest.raises(PlanError, match="window is 0"):
        Transfer(plan, window=0)
    with pytest.raises(PlanError, match="needs 256 bytes of staging"):
        Transfer(plan, max_staging_bytes=255)


@st.composite
def partial_moves(draw: st.DrawFn) -> TensorMove:
    """A tensor of addends on any mesh, wanted in any other layout."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=2)))

    def placements(first: Placement | None) -> list[Placement]:
        any_of = st.sampled_from([Replicate(), *(Split(dim) for dim in range(len(shape)))])
        more: list[Placement] = [draw(st.one_of(st.just(Partial()), any_of))] if first else [draw(any_of)]
        return [first or draw(any_of), *more]

    sides = []
    for first in (Partial(), None):
        length = draw(st.integers(1, 3))
        mesh = Mesh.of({"a": length, "b": 2}, draw(st.permutations(range(6)))[: 2 * length])
        sides.append(layout_from_placements(shape, mesh, placements(first), "float32"))
    return TensorMove("x", *sides)


@given(partial_moves(), st.integers(1, 4), st.sampled_from([4, 8, 64]), st.data())
def test_running_sums_take_in_every_addend_once_and_in_order(
    move: TensorMove, num_hosts: int, chunk_bytes: int, data: st.DataObject
) -> None:
    hosts = {rank: f"h{data.draw(st.integers(0, num_hosts - 1))}" for rank in range(6)}
    reduction = plan_reduction([move], hosts, chunk_bytes)
    carried: dict[int, list[int]] = {}
    done = np.zeros(move.src.global_shape, dtype=int)
    for number, leg in enumerate(reduction.legs):
        before = carried[number - 1] if reduction.continues(number) else []
        carried[number] = before + list(leg.addends)
        if reduction.ends(number):
            assert carried[number] in (sorted(carried[number]), [1, 0])
            assert sorted(carried[number]) == list(range(reduction.num_addends[0]))
            for part in reduction.chunks[leg.chunk].parts:
                done[part.box.slices()] += 1
                assert any(shard.box.contains(part.box) for shard in reduction.wholes[0].shards_of(leg.rank))
    wanted = np.zeros(move.src.global_shape, dtype=int)
    for shard in move.dst.shards:
        wanted[shard.box.slices()] = 1
    np.testing.assert_array_equal(done, wanted)
    reduction.wholes[0].check_disjoint()
    plan_transfer([move], hosts, {"chunk_bytes": 64})


@given(partial_moves(), st.integers(1, 4), st.booleans(), st.data())
def test_no_sum_is_under_the_bound_and_in_a_ring_every_addend_goes_in_once(
    move: TensorMove, num_hosts: int, is_integer: bool, data: st.DataObject
) -> None:
    if is_integer:
        move = TensorMove("x", *(dataclasses.replace(side, dtype="int32") for side in (move.src, move.dst)))
    hosts = {rank: f"h{data.draw(st.integers(0, num_hosts - 1))}" for rank in range(6)}
    ascending = plan_transfer([move], hosts, {})
    ring = plan_transfer([move], hosts, {"sum_order": SumOrder.ANY})  # it checks that every addend goes in once
    assert ascending.certified_ratio >= 1 and ring.certified_ratio >= 1
    assert not is_integer or ring.digest == ascending.digest


@pytest.mark.parametrize("num", [2, 3, 8, 64])
def test_ranks_that_keep_their_parts_of_a_sum_send_the_least_in_a_ring(num: int) -> None:
    size = 16 * num
    mesh = Mesh.of({"tp": num})
    src, dst = (layout_from_placements((size,), mesh, (one,), "float32") for one in (Partial(), Split(0)))
    hosts = {rank: f"h{rank}" for rank in range(num)}
    ring = plan_transfer([TensorMove("x", src, dst)], hosts, {"sum_order": SumOrder.ANY})
    assert ring.lower_bound_bytes == 4 * size * (num - 1) // num and ring.certified_ratio == 1
    assert not ring.plan.bytes_by_pair  # every part ends where it is wanted
    assert ring.busiest_nic_bytes == ring.lower_bound_bytes  # of both stages
    kept = plan_transfer([TensorMove("x", src, dst)], hosts, {})
    assert kept.certified_ratio == (1 if num == 2 else pytest.approx((num + 1) / (num - 1)))


def _reduction_of(num_addends: int, size: int = 600, takers: tuple[int, ...] = (9,)) -> Reduction:
    whole = Box((0,), (size,))
    src = Layout((size,), tuple(Shard(n, whole, addend=n) for n in range(num_addends)), "float32", "sum")
    dst = Layout((size,), tuple(Shard(rank, whole) for rank in takers), "float32")
    return plan_reduction([TensorMove("x", src, dst)], {rank: f"h{rank}" for rank in range(10)}, 1 << 20)


def test_running_sums_cross_every_nic_once() -> None:
    assert set(_reduction_of(4).bytes_by_pair().values()) == {2400}
    # Two addends: each end sends its half of the sum on, the other half to the other end.
    assert _reduction_of(2).bytes_by_pair() == {(0, 1): 1200, (1, 0): 1200}
    # A taker that holds an addend is where the path ends.
    assert _reduction_of(2, takers=(0,)).bytes_by_pair() == {(1, 0): 2400}


DAMAGES: dict[str, Any] = {
    "an addend is left out": lambda r: {"legs": (dataclasses.replace(r.legs[0], addends=()), *r.legs[1:])},
    "an addend goes in twice": lambda r: {"legs": (dataclasses.replace(r.legs[0], addends=(0, 0)), *r.legs[1:])},
    "a rank joins what it has not": lambda r: {"legs": (dataclasses.replace(r.legs[0], rank=5), *r.legs[1:])},
    "a message is lost": lambda r: {"messages": r.messages[1:]},
    "a message comes twice": lambda r: {"messages": (*r.messages, r.messages[-1])},
    "all in one round": lambda r: {"messages": tuple(dataclasses.replace(m, round=0) for m in r.messages)},
    "a message to another rank": lambda r: {"messages": (dataclasses.replace(r.messages[0], taker=7), *r.messages[1:])},
}


@pytest.mark.parametrize("damage", DAMAGES, ids=DAMAGES)
def test_a_damaged_sum_cannot_be_made(damage: str) -> None:
    reduction = _reduction_of(3)
    with pytest.raises(PlanError, match="checking a sum"):
        dataclasses.replace(reduction, **DAMAGES[damage](reduction))


def test_partial_sums_need_a_transfer_and_are_never_wanted() -> None:
    box = Box((0,), (4,))
    plain = Layout((4,), (Shard(0, box),), "float32")
    partial = Layout((4,), (Shard(0, box),), "float32", "sum")
    with pytest.raises(PlanError, match="plan_transfer"):
        plan_reshard([TensorMove("w", partial, plain)], {0: "a"})
    with pytest.raises(PlanError, match="requested as partial sums"):
        TensorMove("w", plain, partial)
    with pytest.raises(PlanError, match="no host for it"):
        plan_transfer([TensorMove("w", partial, plain)], {1: "a"}, {})


def test_timings_take_the_start_from_the_giver_and_the_end_from_the_taker() -> None:
    given_ = [Timing(1, 0, 0, 1, 8, 1.0, 9.0), Timing(1, 1, 0, 1, 8, 2.0, 9.5)]
    taken = [Timing(1, 0, 0, 1, 8, 0.0, 3.0)]
    assert merge_timings(given_, taken) == (Timing(1, 0, 0, 1, 8, 1.0, 3.0), given_[1])
