"""Every strategy moves everything; what it sends over NICs is what the paper says of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout, Shard
from remesh.resharding import Plan, TensorMove, plan_reshard
from remesh.resharding.planning.simulate import simulate_plan
from remesh.resharding.schedule.paper.strategies import STRATEGIES
from tests.profiles import NUM_COSTLY_EXAMPLES
from tests.unit.resharding.cases import expected_of, host_maps, move_lists, nic_loads, pair_of_specs, simulate
from tests.unit.resharding.test_baselines import FINISH_OVER_BOUND
from tests.unit.resharding.test_plan import TABLE_2


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=NUM_COSTLY_EXAMPLES)
@given(data=st.data())
def test_every_wanted_element_arrives_once_whatever_the_strategy(strategy: str, data: st.DataObject) -> None:
    moves = data.draw(move_lists())
    hosts = data.draw(host_maps(moves))
    plan = plan_reshard(moves, hosts, chunk_bytes=data.draw(st.sampled_from([64, 4096])), strategy=strategy)
    arrived = simulate(plan)
    for move in moves:
        for rank in move.dst.holders:
            np.testing.assert_array_equal(arrived[move.name, int(rank)], expected_of(move, int(rank)))
    again = plan_reshard(moves, hosts, chunk_bytes=max(64, max((c.nbytes for c in plan.chunks), default=64)))
    assert Plan.from_json(plan.to_json()).digest == plan.digest
    assert again.lower_bound_bytes == plan.lower_bound_bytes


def test_an_unknown_strategy_is_named_with_those_that_are_known() -> None:
    whole = Box((0,), (8,))
    src, dst = (Layout((8,), (Shard(rank, whole),), "int8") for rank in (0, 1))
    with pytest.raises(PlanError, match="'fastest'.*auto.*chain.*global_allgather"):
        plan_reshard([TensorMove("x", src, dst)], {0: "a", 1: "b"}, strategy="fastest")


# Tensors that plain send/recv puts into each receiving host, from the same source as the cases.
SENT_TO_EACH_DEVICE = {"1": 2, "2": 2, "3": 2, "4": 0.5, "5": 2, "6": 4 / 3, "7": 4, "9": 2}


@pytest.mark.parametrize("case", TABLE_2, ids=[f"case {name}" for name in TABLE_2])
def test_send_recv_enters_a_host_once_for_each_device_and_the_others_once(case: str) -> None:
    shape, src, dst, _ = TABLE_2[case]
    move, hosts = pair_of_specs(shape, src, dst)
    for strategy in STRATEGIES:
        loads = nic_loads(plan_reshard([move], hosts, strategy=strategy), hosts)
        entered = max(nbytes for (_, way), nbytes in loads.items() if way == "in") / move.src.nbytes
        once = SENT_TO_EACH_DEVICE["4"] if case == "4" else SENT_TO_EACH_DEVICE[case] / 4
        assert entered == pytest.approx(SENT_TO_EACH_DEVICE[case] if strategy == "send_recv" else once), strategy


@pytest.mark.parametrize("case", TABLE_2, ids=[f"case {name}" for name in TABLE_2])
def test_plans_of_the_baselines_take_as_long_as_their_orders(case: str) -> None:
    shape, src, dst, _ = TABLE_2[case]
    # Wide enough that a slice makes the chunks that fill a pipeline.
    move, hosts = pair_of_specs((shape[0], 4 * shape[1], 16 * shape[2]), src, dst)
    for name, expected in zip(("naive", "load_balance", "alpa", "dfs"), FINISH_OVER_BOUND[case], strict=True):
        if expected is not None:
            plan = plan_reshard([move], hosts, strategy=name)
            assert simulate_plan(plan).total_s / plan.lower_bound_bytes == pytest.approx(expected, rel=0.1), name


def test_one_sender_of_many_streams_is_chosen_by_load() -> None:
    # Four slices that two hosts hold: two from each.
    quarters = [Box((n * 1024,), (n * 1024 + 1024,)) for n in range(4)]
    src = Layout((4096,), tuple(Shard(rank, box) for rank in (0, 1) for box in quarters), "int8")
    dst = Layout((4096,), tuple(Shard(2 + n, box) for n, box in enumerate(quarters)), "int8")
    hosts = {rank: f"h{rank}" for rank in range(6)}
    for strategy in ("send_recv", "broadcast", "load_balance", "dfs"):
        loads = nic_loads(plan_reshard([TensorMove("x", src, dst)], hosts, strategy=strategy), hosts)
        assert loads["h0", "out"] == loads["h1", "out"] == 2048, strategy
    naive = nic_loads(plan_reshard([TensorMove("x", src, dst)], hosts, strategy="naive"), hosts)
    assert naive["h0", "out"] == 4096
