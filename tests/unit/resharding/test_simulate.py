"""The simulator's times are those of the closed forms, and each part of the network model counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout, Shard
from remesh.resharding import Plan, TensorMove, plan_reshard
from remesh.resharding.model.network import HostLink, Network
from remesh.resharding.planning.simulate import simulate_plan
from remesh.resharding.schedule.paper.cost import SliceCast, cost_of
from tests.unit.resharding.cases import host_maps, move_lists, nic_loads

RATE = 1e6


def multicast(
    num_hosts: int, num_devices: int, nbytes: int, strategy: str, latency_s: float = 0.0, chunk_bytes: int = 1 << 30
) -> Plan:
    """One rank on host ``s`` gives all to every device of the hosts ``d0``, ``d1``, ..."""
    whole = Box((0,), (nbytes,))
    takers = range(1, 1 + num_hosts * num_devices)
    hosts = {0: "s"} | {rank: f"d{(rank - 1) // num_devices:02}" for rank in takers}
    network = Network(dict.fromkeys(hosts.values(), HostLink(RATE)), latency_s)
    src = Layout((nbytes,), (Shard(0, whole),), "int8")
    dst = Layout((nbytes,), tuple(Shard(rank, whole) for rank in takers), "int8")
    move = TensorMove("x", src, dst)
    return plan_reshard([move], hosts, strategy=strategy, network=network, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize(("hosts", "devices"), [(1, 1), (1, 4), (2, 1), (2, 2), (3, 2), (4, 2), (7, 1)])
def test_unchunked_strategies_take_the_closed_forms_of_the_paper(hosts: int, devices: int) -> None:
    nbytes = 840 << 10
    t = nbytes / RATE
    expected = {
        "send_recv": hosts * devices * t,
        "local_allgather": hosts * t,
        "global_allgather": (2 - 1 / hosts) * t,
        "tree": math.ceil(math.log2(hosts + 1)) * t,
    }
    for strategy, seconds in expected.items():
        assert simulate_plan(multicast(hosts, devices, nbytes, strategy)).total_s == pytest.approx(seconds), strategy


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4, 7])
def test_a_chain_takes_one_copy_and_the_chunks_that_fill_it(num_hosts: int) -> None:
    plan = multicast(num_hosts, 1, 128 << 17, "chain")
    num_chunks = len(plan.chunks)
    t = (128 << 17) / RATE
    assert num_chunks == (1 if num_hosts == 1 and num_chunks == 1 else min(64 * (num_hosts - 1), 128))
    assert simulate_plan(plan).total_s == pytest.approx(t * (1 + (num_hosts - 1) / num_chunks))


@pytest.mark.parametrize("strategy", ["send_recv", "local_allgather", "global_allgather", "tree", "chain"])
@pytest.mark.parametrize("latency_s", [0.0, 1e-2])
def test_costs_are_what_the_simulator_says(strategy: str, latency_s: float) -> None:
    for hosts, devices in ((1, 2), (2, 1), (3, 2), (5, 1)):
        for nbytes in (1 << 12, 960 << 10, 1 << 24):
            made = simulate_plan(multicast(hosts, devices, nbytes, strategy, latency_s)).total_s
            cost = cost_of(strategy, SliceCast(nbytes, hosts, devices, RATE, latency_s)).seconds
            # Parts are cut between elements, which can make one of them a byte larger.
            assert made == pytest.approx(cost, rel=2e-3), (hosts, devices, nbytes)


@pytest.mark.parametrize("num_hosts", [2, 3, 4, 8, 13])
@pytest.mark.parametrize("latency_s", [0.0, 0.01])
def test_two_trees_take_no_longer_than_their_cost(num_hosts: int, latency_s: float) -> None:
    made = simulate_plan(multicast(num_hosts, 1, 1 << 25, "two_trees", latency_s)).total_s
    cost = cost_of("two_trees", SliceCast(1 << 25, num_hosts, 1, RATE, latency_s)).seconds
    assert made <= cost * 1.001


@given(st.data())
def test_nothing_is_faster_than_the_bound_or_out_of_order(data: st.DataObject) -> None:
    moves = data.draw(move_lists())
    hosts = data.draw(host_maps(moves))
    plan = plan_reshard(moves, hosts, chunk_bytes=256)
    simulation = simulate_plan(plan)
    loads = nic_loads(plan, hosts)
    assert {key: busy for key, busy in simulation.busy_s.items() if busy} == loads
    assert simulation.total_s >= plan.busiest_nic_bytes >= plan.lower_bound_bytes
    arrived: dict[tuple[int, int], float] = {}
    for message, timed in zip(plan.messages, simulation.messages, strict=True):
        assert timed.start_s >= arrived.get((message.giver, message.chunk), 0.0)
        arrived[message.taker, message.chunk] = timed.finish_s
        for rank in (message.giver, message.taker):
            assert simulation.peak_staging_bytes[rank] >= timed.nbytes


def two_hosts(network: Network, num_messages: int = 1) -> Plan:
    """Messages of 1000 bytes from host a to host b."""
    whole = Box((0,), (1000 * num_messages,))
    src, dst = (Layout(whole.stop, (Shard(rank, whole),), "int8") for rank in (0, 1))
    return plan_reshard([TensorMove("x", src, dst)], {0: "a", 1: "b"}, network=network, chunk_bytes=1000)


def test_the_slower_nic_counts() -> None:
    network = Network({"a": HostLink(1000.0), "b": HostLink(250.0)}, latency_s=0.5)
    simulation = simulate_plan(two_hosts(network))
    assert simulation.total_s == pytest.approx(4.5)
    assert simulation.busy_s["a", "out"] == pytest.approx(1.5)


def test_several_nics_carry_several_messages_at_once() -> None:
    links = HostLink(1000.0, num_nics=2)
    assert simulate_plan(two_hosts(Network({"a": links, "b": links}), 6)).total_s == pytest.approx(3.0)


def test_uplinks_of_racks_are_shared() -> None:
    network = Network({"a": HostLink(1000.0, rack="r"), "b": HostLink(1000.0, rack="s")}, racks={"r": 500.0})
    assert simulate_plan(two_hosts(network, 3)).total_s == pytest.approx(6.0)
    same_rack = Network({"a": HostLink(1000.0, rack="r"), "b": HostLink(1000.0, rack="r")}, racks={"r": 500.0})
    assert simulate_plan(two_hosts(same_rack, 3)).total_s == pytest.approx(3.0)


def test_a_plan_can_be_simulated_on_another_network_that_has_its_hosts() -> None:
    plan = two_hosts(Network.uniform("ab"))
    assert simulate_plan(plan, Network.uniform("abc")).total_s == 1000.0
    with pytest.raises(PlanError, match="not in the network: b"):
        simulate_plan(plan, Network.uniform("a"))


def test_copies_inside_a_host_take_time_only_where_their_rate_is_known() -> None:
    whole = Box((0,), (1000,))
    src = Layout((1000,), (Shard(0, whole),), "int8")
    dst = Layout((1000,), (Shard(1, whole),), "int8")
    plan = plan_reshard([TensorMove("x", src, dst)], {0: "a", 1: "a"})
    assert simulate_plan(plan).total_s == 0.0
    assert simulate_plan(plan, Network({"a": HostLink(1.0, local_rate_bytes_per_s=100.0)})).total_s == 10.0


def test_a_relay_keeps_a_chunk_until_it_has_passed_it_on() -> None:
    plan = multicast(2, 1, 1 << 20, "chain")
    chunk = plan.chunks[0].nbytes
    staging = simulate_plan(plan).peak_staging_bytes
    # The relay receives one chunk while it sends the one before; the others deal with one at a time.
    assert staging == {0: chunk, 1: 2 * chunk, 2: chunk}
