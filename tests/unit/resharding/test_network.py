"""Networks are values with a JSON form; bounds, splits and schedules follow their rates."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, strategies as st

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout, Shard
from remesh.resharding import Plan, TensorMove, plan_reshard
from remesh.resharding.model.bound import HostGroup, bound_of_groups
from remesh.resharding.model.flow import Work, spread
from remesh.resharding.model.network import HostLink, Network
from remesh.resharding.planning.simulate import simulate_plan
from tests.unit.resharding.cases import host_maps, move_lists, networks, pair_of_specs


@given(networks(["a", "b", "c"]))
def test_a_network_survives_json(network: Network) -> None:
    assert Network.from_json(json.loads(json.dumps(network.to_json()))) == network


HOST = {"rate_bytes_per_s": 1e9}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, "NoneType"),
        ({"format": "remesh.plan", "version": 1}, "remesh.plan"),
        ({"hosts": []}, "'hosts' is list"),
        ({"hosts": {"a": {}}}, "host 'a'"),
        ({"hosts": {"a": {"rate_bytes_per_s": 0}}}, "host 'a'.*rate is 0"),
        ({"hosts": {"a": {"rate_bytes_per_s": True}}}, "rate is True"),
        ({"hosts": {"a": {"rate_bytes_per_s": math.nan}}}, "rate is nan"),
        ({"hosts": {"a": {"rate_bytes_per_s": math.inf}}}, "rate is inf"),
        ({"hosts": {"a": {**HOST, "num_nics": 0}}}, "0 NICs"),
        ({"hosts": {"a": {**HOST, "rack": 3}}}, "rack is 3"),
        ({"hosts": {"a": {**HOST, "speed": 3}}}, "speed"),
        ({"hosts": {"a": HOST}, "latency_s": -1}, "latency is -1"),
        ({"hosts": {"a": HOST}, "racks": {"r": {"uplink_bytes_per_s": 1.0}}}, "rack 'r'.*none of 1 hosts"),
        ({"hosts": {"a": {**HOST, "rack": "r"}}, "racks": {"r": 5}}, "rack 'r' is 5"),
        ({"hosts": {"a": {**HOST, "rack": "r"}}, "racks": {"r": {"uplink_bytes_per_s": "x"}}}, "rack 'r'.*'x'"),
    ],
)
def test_json_that_is_no_network_is_refused_by_what_is_wrong(value: Any, named: str) -> None:
    if isinstance(value, dict):
        value = {"format": "remesh.network", "version": 1, **value}
    with pytest.raises(PlanError, match=named):
        Network.from_json(value)


def _half_and_half() -> tuple[TensorMove, dict[int, str]]:
    return pair_of_specs((64, 64, 32), ("RRR", (2, 2)), ("S0RR", (2, 2)))


def test_a_host_that_the_network_lacks_is_named_before_anything_is_planned() -> None:
    move, hosts = _half_and_half()
    network = Network.uniform(["src0", "src1", "dst0"])
    with pytest.raises(PlanError, match=r"not in the network: dst1"):
        plan_reshard([move], hosts, network=network)


@given(st.data())
def test_on_equal_links_the_bound_in_time_is_the_bound_in_bytes(data: st.DataObject) -> None:
    moves = data.draw(move_lists())
    hosts = data.draw(host_maps(moves))
    plain = plan_reshard(moves, hosts, chunk_bytes=256)
    plan = plan_reshard(moves, hosts, chunk_bytes=256, network=Network.uniform(hosts.values()))
    assert plan.lower_bound_bytes == plain.lower_bound_bytes
    assert plan.lower_bound_s is not None and plain.lower_bound_s is None
    assert math.ceil(plan.lower_bound_s) == plan.lower_bound_bytes
    assert plan.certified_ratio >= 1 - 1e-9
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@given(st.data())
def test_plans_on_any_network_check_themselves_and_stay_above_its_bound(data: st.DataObject) -> None:
    moves = data.draw(move_lists())
    hosts = data.draw(host_maps(moves))
    network = data.draw(networks(sorted(set(hosts.values()))))
    plan = plan_reshard(moves, hosts, chunk_bytes=256, network=network)
    assert plan.certified_ratio >= 1 - 1e-9
    assert plan.lower_bound_s is not None
    assert simulate_plan(plan, network).total_s >= plan.lower_bound_s * (1 - 1e-9)
    back = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert (back, back.digest) == (plan, plan.digest)


HOSTS = ("a", "b", "c", "d")


@given(
    st.dictionaries(
        st.tuples(*[st.sets(st.sampled_from(HOSTS), min_size=1).map(lambda found: tuple(sorted(found)))] * 2),
        st.integers(1, 60),
        min_size=1,
        max_size=4,
    ),
    st.tuples(*[st.integers(1, 5)] * len(HOSTS)),
)
def test_the_bound_divides_by_rates_as_brute_force_over_all_sets_does(
    sides: dict[tuple[tuple[str, ...], tuple[str, ...]], int], rates: tuple[int, ...]
) -> None:
    groups: dict[HostGroup, int] = {}
    for (owners, takers), nbytes in sides.items():
        group = HostGroup(owners, tuple(host for host in takers if host not in owners))
        groups[group] = groups.get(group, 0) + nbytes
    rate = dict(zip(HOSTS, rates, strict=True))
    crossing = {group: nbytes for group, nbytes in groups.items() if group.receivers}
    best = Fraction(0)
    for host in HOSTS:
        best = max(best, Fraction(sum(n for g, n in crossing.items() if host in g.receivers), rate[host]))
    for mask in range(1, 1 << len(HOSTS)):
        inside = {host for at, host in enumerate(HOSTS) if mask >> at & 1}
        forced = sum(n for g, n in crossing.items() if set(g.owners) <= inside)
        best = max(best, Fraction(forced, sum(rate[host] for host in inside)))
    bound = bound_of_groups(groups, Network({host: HostLink(float(rate[host])) for host in HOSTS}))
    assert bound.exact == best
    assert bound.seconds == float(best)


def test_loads_follow_rates_to_the_byte() -> None:
    shares = spread([Work(90, 1, ("slow", "fast"))], rates={"slow": Fraction(1), "fast": Fraction(2)})
    assert (shares.load, shares.by_worker) == (30, ({"slow": 30, "fast": 60},))


def _simulated_ratio(plan: Plan) -> float:
    assert plan.lower_bound_s is not None
    return simulate_plan(plan, plan.network).total_s / plan.lower_bound_s


@pytest.mark.parametrize("slow", ["src0", "dst0"])
def test_a_host_at_half_rate_gets_half_the_work_where_there_is_a_choice(slow: str) -> None:
    move, hosts = pair_of_specs((256, 256, 128), ("RRR", (2, 4)), ("S0RR", (2, 4)))
    rates = dict.fromkeys(hosts.values(), HostLink(1e9)) | {slow: HostLink(5e8)}
    plan = plan_reshard([move], hosts, network=Network(rates), chunk_bytes=1 << 16)
    assert plan.certified_ratio == pytest.approx(1.0, abs=0.01)
    assert _simulated_ratio(plan) < 1.08
    if slow == "src0":
        assert plan.nic_bytes["src0", "out"] == pytest.approx(plan.nic_bytes["src1", "out"] / 2, rel=0.02)


def test_several_nics_are_used_at_the_same_time() -> None:
    move, hosts = pair_of_specs((256, 256, 128), ("S0RR", (1, 4)), ("S0RR", (2, 4)))
    links = dict.fromkeys(hosts.values(), HostLink(1e9)) | {"src0": HostLink(1e9, num_nics=2)}
    plan = plan_reshard([move], hosts, network=Network(links), chunk_bytes=1 << 18)
    assert plan.certified_ratio == 1.0
    assert _simulated_ratio(plan) < 1.02
    out_by_round = [message.round for message in plan.messages if message.taker > 3 >= message.giver]
    assert max(map(out_by_round.count, out_by_round)) == 2


def test_a_byte_enters_a_rack_once_and_is_passed_on_inside() -> None:
    whole = Box((0,), (1 << 20,))
    src = Layout((1 << 20,), (Shard(0, whole),), "int8")
    dst = Layout((1 << 20,), tuple(Shard(rank, whole) for rank in range(1, 7)), "int8")
    hosts = {rank: f"h{rank}" for rank in range(7)}
    links = {host: HostLink(1e9, rack="near" if host in ("h0", "h3") else "far") for host in hosts.values()}
    network = Network(links, racks={"near": 1e9, "far": 1e9})
    plan = plan_reshard([TensorMove("x", src, dst)], hosts, network=network)
    entering = sum(n for (a, b), n in plan.bytes_by_pair.items() if {a, b} <= {0, 3, *range(7)} and _enters(a, b))
    assert entering == 1 << 20
    assert plan.certified_ratio == 1.0


def _enters(giver: int, taker: int) -> bool:
    return giver in (0, 3) and taker not in (0, 3)


def test_an_owner_in_each_rack_serves_its_own() -> None:
    whole = Box((0,), (1 << 20,))
    src = Layout((1 << 20,), (Shard(0, whole), Shard(1, whole)), "int8")
    dst = Layout((1 << 20,), tuple(Shard(rank, whole) for rank in range(2, 6)), "int8")
    hosts = {rank: f"h{rank}" for rank in range(6)}
    links = {host: HostLink(1e9, rack=f"r{rank % 2}") for rank, host in hosts.items()}
    plan = plan_reshard(
        [TensorMove("x", src, dst)], hosts, network=Network(links, racks={"r0": 1e8, "r1": 1e8}), chunk_bytes=1 << 14
    )
    assert all(giver % 2 == taker % 2 for giver, taker in plan.bytes_by_pair)


def test_the_bound_says_which_uplink_forces_it() -> None:
    move, hosts = _half_and_half()
    links = {host: HostLink(1e9, rack=host[:3]) for host in hosts.values()}
    plan = plan_reshard([move], hosts, network=Network(links, racks={"src": 1e8, "dst": 1e9}))
    assert "rack" in plan.bound.reason and "src" in plan.bound.reason
    assert plan.lower_bound_s == pytest.approx(move.src.nbytes / 1e8)
    assert plan.certified_ratio == pytest.approx(1.0)
