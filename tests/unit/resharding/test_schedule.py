"""Stages carry exactly the traffic in the least time; trees reach everyone; schedules end at the bound."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout, Shard
from remesh.resharding import Plan, TensorMove, plan_reshard
from remesh.resharding.model.bound import HostGroup
from remesh.resharding.model.network import HostLink, Network
from remesh.resharding.planning.simulate import simulate_plan
from remesh.resharding.schedule.order import HostLanes, compute_order, decompose, lines_of
from remesh.resharding.schedule.senders import split_senders
from remesh.resharding.schedule.timeline import compute_starts, number_rounds
from remesh.resharding.schedule.trees import chain_hops, depths_of, rotate, two_tree_hops
from tests.unit.resharding.cases import pair_of_specs
from tests.unit.resharding.test_order import sending_lists
from tests.unit.resharding.test_plan import TABLE_2

TRAFFIC = st.dictionaries(st.tuples(st.integers(0, 5), st.integers(3, 9)), st.integers(1, 40), max_size=16)


@given(TRAFFIC)
def test_stages_carry_exactly_the_traffic_and_last_as_long_as_the_busiest_line(
    traffic: dict[tuple[int, int], int],
) -> None:
    stages = decompose(traffic)
    carried: dict[tuple[int, int], int] = {}
    end = 0
    for stage in stages:
        assert stage.start >= end
        end = stage.start + stage.length
        for side in (0, 1):
            lines = [pair[side] for pair in stage.pairs]
            assert len(set(lines)) == len(lines)
        for pair in stage.pairs:
            carried[pair] = carried.get(pair, 0) + stage.length
    assert carried == traffic
    rows = [sum(n for (a, _), n in traffic.items() if a == line) for line in range(10)]
    columns = [sum(n for (_, b), n in traffic.items() if b == line) for line in range(10)]
    assert end == max(rows + columns)
    assert len(stages) <= 2 * len(traffic) + 4 * 10


@given(st.integers(1, 70))
def test_two_trees_reach_everyone_and_no_host_is_interior_in_both(count: int) -> None:
    receivers = tuple(f"h{n:02d}" for n in range(count))
    interior = []
    for hops in two_tree_hops("owner", receivers):
        informed = {"owner"}
        for hop in hops:
            assert hop.giver in informed and hop.taker not in informed
            informed.add(hop.taker)
        assert informed == {"owner", *receivers}
        givers = [hop.giver for hop in hops]
        assert givers.count("owner") == 1
        assert all(givers.count(host) <= 2 for host in receivers)
        assert max(depths_of(hops).values()) <= count.bit_length()
        interior.append(set(givers) - {"owner"})
    assert not interior[0] & interior[1]


def test_chains_from_as_many_owners_as_receivers_make_a_ring() -> None:
    receivers = ("a", "b", "c")
    hops = [chain_hops(f"o{n}", rotate(receivers, n)) for n in range(3)]
    for at in range(3):  # the hops that happen at the same time
        assert {chain[at].taker for chain in hops} == set(receivers)


@given(sending_lists(), st.data())
def test_sequences_in_time_keep_relays_behind_their_source_and_fill_rounds_without_gaps(found, data) -> None:  # type: ignore[no-untyped-def]
    host_of = {rank: f"h{data.draw(st.integers(0, 3))}" for rank in range(6)}
    progress = [data.draw(st.floats(0, 0.99)) for _ in range(8)]
    lanes = HostLanes(host_of)
    order = compute_order(found, progress, data.draw(st.integers(1, 5)), lines_of(host_of))
    assert sorted(order) == list(range(len(found)))
    place = {number: at for at, number in enumerate(order)}
    assert all(sending.after < 0 or place[sending.after] < place[n] for n, sending in enumerate(found))
    sequence = compute_starts(found, order, host_of)
    assert sorted(sequence) == list(range(len(found)))
    rounds = number_rounds(found, sequence, lanes)
    busy = set()
    for sending, at in zip(found, rounds, strict=True):
        ends = [(at, sending.giver, "gives"), (at, sending.taker, "takes")]
        a, b = host_of[sending.giver], host_of[sending.taker]
        ends += [(at, a, "out"), (at, b, "in")] if a != b else []
        assert not busy.intersection(ends)
        busy.update(ends)
        assert sending.after < 0 or rounds[sending.after] < at
    assert set(rounds) == set(range(max(rounds, default=-1) + 1))


def _simulated_ratio(plan: Plan) -> float:
    return simulate_plan(plan).total_s / plan.lower_bound_bytes


@pytest.mark.parametrize("case", TABLE_2)
def test_the_published_cases_end_at_the_bound_in_time_too(case: str) -> None:
    shape, src, dst, _ = TABLE_2[case]
    shape = tuple(4 * size for size in shape)
    move, hosts = pair_of_specs(shape, src, dst)
    assert _simulated_ratio(plan_reshard([move], hosts, chunk_bytes=1 << 17)) < 1.05


def test_triangle_multicast_ends_at_the_bound_where_exclusive_orders_need_half_as_much_again() -> None:
    size = 1 << 20
    parts = [Box((n * size,), ((n + 1) * size,)) for n in range(3)]
    src = Layout((3 * size,), tuple(Shard(10 + n, box) for n, box in enumerate(parts)), "int8")
    wants = {1: (0, 2), 2: (0, 1), 3: (1, 2)}
    dst = Layout((3 * size,), tuple(Shard(rank, parts[n]) for rank, pair in wants.items() for n in pair), "int8")
    plan = plan_reshard(
        [TensorMove("x", src, dst)], {rank: f"h{rank}" for rank in (1, 2, 3, 10, 11, 12)}, chunk_bytes=1 << 14
    )
    assert plan.certified_ratio == 1.0
    assert _simulated_ratio(plan) < 1.06


def test_random_pairs_of_specs_end_near_the_bound_in_time() -> None:
    chance = random.Random(7)
    ratios = []
    for _ in range(30):
        sides = [
            ("".join(chance.choice(["S0RR", "RS1R", "RRS01", "S1RS0", "RRR"])), (chance.randint(1, 4), 2))
            for _ in range(2)
        ]
        move, hosts = pair_of_specs((96, 96, 64), *sides)
        ratios.append(_simulated_ratio(plan_reshard([move], hosts, chunk_bytes=1 << 13)))
    assert sorted(ratios)[len(ratios) * 9 // 10] < 1.06
    assert max(ratios) < 1.25


def test_at_scale_owners_share_and_receivers_pass_on_within_the_bound() -> None:
    # Above the size of the exact program: 40 replicas own 60 groups, each wanted by other 30 hosts.
    owners = tuple(f"o{n:02d}" for n in range(40))
    receivers = tuple(f"r{n:02d}" for n in range(60))
    groups = [(HostGroup(owners, rotate(receivers, n)[:30]), 100 + n) for n in range(60)]
    split = split_senders(groups)
    sent: dict[str, int] = {}
    taken: dict[str, int] = {}
    for (group, nbytes), routes in zip(groups, split.routes, strict=True):
        assert [route.start for route in routes] == [0, *(route.stop for route in routes[:-1])]
        assert routes[-1].stop == nbytes
        for route in routes:
            informed = set(group.owners)
            for hop in route.hops:
                assert hop.giver in informed and hop.taker not in informed
                informed.add(hop.taker)
                sent[hop.giver] = sent.get(hop.giver, 0) + route.stop - route.start
                taken[hop.taker] = taken.get(hop.taker, 0) + route.stop - route.start
            assert informed == {*group.owners, *group.receivers}
    assert max(sent.values()) <= max(taken.values())
    total = sum(nbytes for _, nbytes in groups)
    assert max(sent[host] for host in owners) == -(-total // len(owners))


def _multicast(nbytes: int, num_receivers: int, latency_s: float, **more: str) -> Plan:
    whole = Box((0,), (nbytes,))
    src = Layout((nbytes,), (Shard(0, whole),), "int8")
    dst = Layout((nbytes,), tuple(Shard(rank, whole) for rank in range(1, num_receivers + 1)), "int8")
    hosts = {rank: f"h{rank}" for rank in range(num_receivers + 1)}
    network = Network(dict.fromkeys(hosts.values(), HostLink(1e9)), latency_s)
    return plan_reshard([TensorMove("x", src, dst)], hosts, network=network, **more)  # type: ignore[arg-type]


def test_auto_leaves_chains_where_latency_counts_and_keeps_them_where_bytes_do() -> None:
    small = _multicast(1000, 15, 1e-4)
    assert simulate_plan(small).total_s < 0.4 * simulate_plan(_multicast(1000, 15, 1e-4, strategy="split")).total_s
    large = _multicast(1 << 26, 4, 1e-5)
    assert large == _multicast(1 << 26, 4, 1e-5, strategy="split")
    assert _in_seconds(large) < 1.08


def test_chunks_are_as_many_as_the_closed_form_asks_for() -> None:
    nbytes, latency_s = 1 << 24, 1e-4
    plan = _multicast(nbytes, 3, latency_s)
    best = (2 * nbytes / 1e9 / latency_s) ** 0.5
    assert len(plan.chunks) == pytest.approx(best, rel=0.1)


def _in_seconds(plan: Plan) -> float:
    assert plan.lower_bound_s is not None
    return simulate_plan(plan).total_s / plan.lower_bound_s


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"strategy 'fastest' is unknown.*'auto'.*'split'"):
        _multicast(10, 2, 0.0, strategy="fastest")
