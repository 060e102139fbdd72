"""Plans of flows are plans like others: rows stand for messages that somebody would have written down one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout, Shard
from remesh.resharding import Plan, TensorMove, plan_reshard, plan_transfer
from remesh.resharding.planning import planner
from remesh.resharding.planning.simulate import simulate_plan
from remesh.resharding.schedule.flow_bytes import bytes_taken
from remesh.resharding.schedule.flow_messages import FlowMessages
from remesh.resharding.schedule.flows import Flows
from remesh.resharding.schedule.parts import Chunks, PartRows
from remesh.resharding.schedule.regular import colour_hops, compute_waiting
from tests.unit.resharding.cases import expected_of, host_maps, move_lists, pair_of_specs, simulate

_UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture
def always_flows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Even the smallest plan is one of flows."""
    monkeypatch.setattr(planner, "_MAX_TIMED", -1)
    yield


def written_out(plan: Plan) -> Plan:
    """The same plan with every message and chunk as an object; the check looks at each of them."""
    return Plan(plan.moves, plan.host_of, tuple(plan.chunks), tuple(plan.messages), plan.copies, plan.bound)


@pytest.mark.usefixtures("always_flows")
@settings(suppress_health_check=_UNCHECKED)
@given(st.data())
def test_flows_bring_every_element_once_and_say_the_same_as_their_messages(data: st.DataObject) -> None:
    moves = data.draw(move_lists())
    hosts = data.draw(host_maps(moves))
    plan = plan_reshard(moves, hosts, chunk_bytes=data.draw(st.sampled_from([64, 256, 4096])))
    assert isinstance(plan.messages, FlowMessages)
    arrived = simulate(plan)
    for move in moves:
        for rank in move.dst.holders:
            np.testing.assert_array_equal(arrived[move.name, int(rank)], expected_of(move, int(rank)))
    plain = written_out(plan)
    assert len(plain.messages) == len(plan.messages)
    assert list(plain.messages) == [plan.messages[number] for number in range(len(plan.messages))]
    assert list(plain.chunks) == [plan.chunks[number] for number in range(len(plan.chunks))]
    for fact in ("bytes_by_pair", "nic_bytes", "num_rounds", "ranks", "certified_ratio", "bytes_copied"):
        assert getattr(plan, fact) == getattr(plain, fact), fact
    taken: dict[int, int] = {}
    for (_, taker), nbytes in plain.bytes_by_pair.items():
        taken[taker] = taken.get(taker, 0) + nbytes
    assert bytes_taken(plan.messages.flows) == taken
    for rank in hosts:
        assert plan.program_of(rank) == plain.program_of(rank)


@pytest.mark.usefixtures("always_flows")
@settings(suppress_health_check=_UNCHECKED)
@given(st.data())
def test_flows_survive_json_and_depend_on_values_only(data: st.DataObject) -> None:
    moves = data.draw(move_lists())
    hosts = data.draw(host_maps(moves))
    plan = plan_reshard(moves, hosts, chunk_bytes=256)
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert back.digest == plan.digest
    again = plan_reshard(list(reversed(moves)), dict(reversed(hosts.items())), chunk_bytes=256)
    assert again.digest == plan.digest
    assert (
        plan_reshard(moves, hosts, chunk_bytes=64).digest != plan.digest
        or len(plan.messages) == 0
        or all(chunk.nbytes <= 64 for chunk in plan.chunks)
    )


def _base_plan(names: str = "w") -> Plan:
    # Two owners, a chain of two receiver hosts with two devices each, a replica that is served beside its owner.
    halves = [Box((8 * n, 0), (8 * n + 8, 4)) for n in range(2)]
    whole = Box((0, 0), (16, 4))
    src = Layout((16, 4), tuple(Shard(rank, halves[rank]) for rank in range(2)), "int16")
    dst = Layout((16, 4), (Shard(2, halves[0]), *(Shard(rank, whole) for rank in (1, 3, 4, 5, 6))), "int16")
    hosts = {0: "a", 1: "b", 2: "a", 3: "c", 4: "c", 5: "d", 6: "d"}
    return plan_reshard([TensorMove(name, src, dst) for name in names], hosts)


def _with(plan: Plan, **columns: object) -> Plan:
    assert isinstance(plan.messages, FlowMessages)
    flows = dataclasses.replace(plan.messages.flows, **columns)
    return dataclasses.replace(plan, chunks=flows.chunks, messages=FlowMessages(flows))


def _changed(name: str, at: int, by: int) -> Callable[[Plan, Flows], Plan]:
    def damage(plan: Plan, flows: Flows) -> Plan:
        column = getattr(flows, name).copy()
        column[at] += by
        return _with(plan, **{name: column})

    return damage


def _with_parts(plan: Plan, flows: Flows, **columns: object) -> Plan:
    parts = dataclasses.replace(flows.chunks.parts, **columns)
    return _with(plan, chunks=Chunks(parts, flows.chunks.first_part))


def _moved_part(plan: Plan, flows: Flows) -> Plan:
    parts, step = flows.chunks.parts, np.array([1, 0])
    return _with_parts(plan, flows, starts=parts.starts + step, stops=parts.stops + step)


def _without_last_flow(plan: Plan, flows: Flows) -> Plan:
    chunks, hops = int(flows.first_chunk[-2]), int(flows.first_hop[-2])
    num_parts = int(flows.chunks.first_part[chunks])
    parts = flows.chunks.parts.take(np.arange(num_parts))
    return _with(
        plan,
        chunks=Chunks(parts, flows.chunks.first_part[: chunks + 1]),
        givers=flows.givers[:chunks],
        takers=flows.takers[:chunks],
        first_chunk=flows.first_chunk[:-1],
        first_hop=flows.first_hop[:-1],
        hop_giver=flows.hop_giver[:hops],
        hop_taker=flows.hop_taker[:hops],
        hop_colour=flows.hop_colour[:hops],
    )


def _twice(plan: Plan, flows: Flows) -> Plan:
    num_chunks, num_hops = len(flows.givers), len(flows.hop_giver)
    joined = {name: np.tile(getattr(flows, name), 2) for name in ("givers", "takers", "hop_giver", "hop_taker")}
    colours = np.concatenate((flows.hop_colour, flows.hop_colour + flows.num_colours))
    first_part = np.concatenate((flows.chunks.first_part, flows.chunks.first_part[1:] + len(flows.chunks.parts)))
    return _with(
        plan,
        chunks=Chunks(PartRows.joined([flows.chunks.parts] * 2), first_part),
        hop_colour=colours,
        first_chunk=np.concatenate((flows.first_chunk, flows.first_chunk[1:] + num_chunks)),
        first_hop=np.concatenate((flows.first_hop, flows.first_hop[1:] + num_hops)),
        **joined,
    )


DAMAGES: dict[str, Callable[[Plan, Flows], Plan]] = {
    "a flow is lost": _without_last_flow,
    "everything twice": _twice,
    "a copy is lost": lambda plan, flows: dataclasses.replace(plan, copies=()),
    "a copy twice": lambda plan, flows: dataclasses.replace(plan, copies=plan.copies * 2),
    "a copy of what arrives": lambda plan, flows: dataclasses.replace(
        plan, copies=(dataclasses.replace(plan.copies[0], box=Box((0, 0), (16, 4))),)
    ),
    "all colours equal": lambda plan, flows: _with(plan, hop_colour=np.zeros_like(flows.hop_colour)),
    "a colour below 0": _changed("hop_colour", 0, -99),
    "a colour without bound": _changed("hop_colour", 0, 1 << 40),
    "other givers": lambda plan, flows: _with(plan, givers=flows.takers),
    "other takers": lambda plan, flows: _with(plan, takers=flows.takers[::-1].copy()),
    "a rank set that is not there": _changed("givers", 0, 99),
    "a host that is not there": _changed("hop_taker", 0, 99),
    "a hop from a host that has nothing": lambda plan, flows: _with(plan, hop_giver=(flows.hop_giver + 1) % 4),
    "hops in a ring": lambda plan, flows: _with(plan, hop_giver=flows.hop_taker[::-1].copy()),
    "hops of another flow": _changed("first_hop", 1, 1),
    "chunks of another flow": _changed("first_chunk", 1, -1),
    "ranks that go down": lambda plan, flows: _with(plan, rank_sets=tuple(r[::-1] for r in flows.rank_sets)),
    "a rank without host": lambda plan, flows: _with(plan, rank_sets=(*flows.rank_sets[:-1], (77,))),
    "an empty rank set": lambda plan, flows: _with(plan, rank_sets=((), *flows.rank_sets[1:])),
    "other hosts": lambda plan, flows: _with(plan, hosts=("a", "b", "c", "z")),
    "parts elsewhere": _moved_part,
    "empty parts": lambda plan, flows: _with_parts(plan, flows, stops=flows.chunks.parts.starts),
    "parts of other bytes": lambda plan, flows: _with_parts(plan, flows, nbytes=flows.chunks.parts.nbytes + 1),
    "parts of another tensor": lambda plan, flows: _with_parts(plan, flows, tensor=flows.chunks.parts.tensor + 1),
    "parts of other dims": lambda plan, flows: _with_parts(plan, flows, starts=flows.chunks.parts.starts[:, :1]),
}


@pytest.mark.usefixtures("always_flows")
@pytest.mark.parametrize("damage", DAMAGES, ids=DAMAGES)
def test_a_damaged_plan_of_flows_cannot_be_made(damage: str) -> None:
    plan = _base_plan()
    assert isinstance(plan.messages, FlowMessages)
    with pytest.raises(PlanError, match="checking a reshard plan"):
        DAMAGES[damage](plan, plan.messages.flows)


@pytest.mark.usefixtures("always_flows")
@pytest.mark.parametrize("tensor", range(3))
def test_a_damage_of_one_of_many_tensors_of_one_layout_is_seen(tensor: int) -> None:
    plan = _base_plan("uvw")
    assert isinstance(plan.messages, FlowMessages)
    flows = plan.messages.flows
    parts = flows.chunks.parts
    step = (parts.tensor == tensor)[:, None] * np.array([1, 0])
    others = tuple(copy for copy in plan.copies if copy.tensor != tensor)
    assert len(others) < len(plan.copies)
    larger = dataclasses.replace(plan.copies[0], tensor=tensor, box=Box((0, 0), (16, 4)))
    for damage in (
        lambda: _with_parts(plan, flows, starts=parts.starts + step, stops=parts.stops + step),
        lambda: _with_parts(plan, flows, starts=parts.starts - step, stops=parts.stops - step),
        lambda: dataclasses.replace(plan, copies=others),
        lambda: dataclasses.replace(plan, copies=(*others, larger)),
    ):
        with pytest.raises(PlanError, match="checking a reshard plan"):
            damage()


@pytest.mark.usefixtures("always_flows")
@settings(suppress_health_check=_UNCHECKED)
@given(st.data())
def test_what_the_check_of_flows_lets_through_the_check_of_messages_does_too(data: st.DataObject) -> None:
    plan = _base_plan()
    assert isinstance(plan.messages, FlowMessages)
    name = data.draw(
        st.sampled_from(["givers", "takers", "first_chunk", "first_hop", "hop_giver", "hop_taker", "hop_colour"])
    )
    column = getattr(plan.messages.flows, name).copy()
    for _ in range(data.draw(st.integers(1, 3))):
        column[data.draw(st.integers(0, len(column) - 1))] = data.draw(st.integers(0, 6))
    try:
        changed = _with(plan, **{name: column})
    except PlanError:
        return
    written_out(changed)


@pytest.mark.usefixtures("always_flows")
@given(st.data())
@settings(suppress_health_check=_UNCHECKED)
def test_json_of_flows_with_any_field_replaced_is_refused_or_a_plan(data: st.DataObject) -> None:
    value = _base_plan().to_json()
    junk = st.one_of(st.none(), st.integers(-2, 99), st.text(max_size=3), st.lists(st.integers(-1, 9), max_size=4))
    flows = value["flows"]
    key = data.draw(st.sampled_from(sorted(flows)))
    target = flows[key]
    if data.draw(st.booleans()) or not target:
        flows[key] = data.draw(junk)
    else:
        at = data.draw(st.integers(0, len(target) - 1))
        if isinstance(target[at], list) and target[at] and data.draw(st.booleans()):
            target[at][data.draw(st.integers(0, len(target[at]) - 1))] = data.draw(junk)
        else:
            target[at] = data.draw(junk)
    try:
        Plan.from_json(value)
    except ValueError as error:  # PlanError and LayoutError are both
        assert type(error) is not ValueError


def test_plans_of_the_first_version_are_still_read() -> None:
    move, hosts = pair_of_specs((64, 64), ("S0R", (2, 2)), ("RS0", (2, 2)))
    plan = plan_reshard([move], hosts)
    old = {key: value for key, value in plan.to_json().items() if key != "flows"} | {"version": 1}
    assert Plan.from_json(old) == plan


def test_a_large_plan_is_flows_and_each_rank_makes_its_own_messages() -> None:
    move, hosts = pair_of_specs((1920, 1024), ("S01R", (24, 8)), ("RS1", (24, 8)))
    plan = plan_reshard([move], hosts)
    assert isinstance(plan.messages, FlowMessages)
    assert len(plan.messages) == 24 * 8 * 8 * 24
    assert plan.certified_ratio == 1.0
    everything = plan.messages.columns
    for rank in (0, 100, 192, 300, 383):
        gives, takes = plan.messages.of_rank(rank)
        for mine, whose in ((gives, everything.giver), (takes, everything.taker)):
            assert mine == everything.take(np.flatnonzero(whose == rank)).messages()
    transfer = plan_transfer([move], hosts, {})
    assert transfer.steps_of(200).staging_bytes > 0
    assert len(transfer.ranks) == 384


@pytest.mark.parametrize("pair", ["S0R>RS0", "S01R>RS0", "S0S1>S1S0", "RS1>S01R", "S0R>RR", "S01R>RS1"])
def test_flows_keep_all_nics_busy_on_uneven_meshes_too(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_MAX_TIMED", -1)
    src, dst = pair.split(">")
    move, hosts = pair_of_specs((3000, 5001), (src, (20, 2)), (dst, (13, 4)))
    plan = plan_reshard([move], hosts)
    assert plan.certified_ratio <= 1.005
    assert simulate_plan(plan).total_s / plan.lower_bound_bytes <= 1.06


def test_few_messages_of_uneven_traffic_are_still_scheduled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_MAX_TIMED_BY_HOSTS", -1)
    move, hosts = pair_of_specs((64, 64), ("S0R", (4, 2)), ("RS0", (4, 2)))
    even = plan_reshard([move], hosts)
    assert isinstance(even.messages, FlowMessages)
    assert compute_waiting(even.messages.flows) == 1.0
    monkeypatch.setattr(planner, "_MAX_WAITING", 0.99)
    assert isinstance(plan_reshard([move], hosts).messages, tuple)


def test_hosts_that_wait_for_each_other_are_seen() -> None:
    # Two hosts give to two others; what one of them has to give first is what the other taker waits for.
    move, hosts = pair_of_specs((9, 64), ("S0R", (2, 1)), ("RS0", (2, 1)))
    plan = plan_reshard([move], hosts)
    flows = make_flows_of(plan)
    assert compute_waiting(flows) == pytest.approx(1.0)
    assert compute_waiting(dataclasses.replace(flows, hop_colour=np.array([0, 1, 2, 3]))) > 1.3


def make_flows_of(plan: Plan) -> Flows:
    """The flows that the same moves make when they must be flows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_MAX_TIMED", -1)
        again = plan_reshard(plan.moves, plan.host_of)
    assert isinstance(again.messages, FlowMessages)
    return again.messages.flows


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=60))
def test_no_two_hops_out_of_or_into_a_host_have_one_colour(pairs: list[tuple[int, int]]) -> None:
    giver, taker = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    colours = colour_hops(giver, taker).tolist()
    for side in (giver.tolist(), taker.tolist()):
        assert len(set(zip(side, colours, strict=True))) == len(pairs)


def test_even_traffic_needs_no_more_colours_than_a_host_has_hops() -> None:
    grid = np.array([(a, 5 + b) for a in range(5) for b in range(5)])
    assert colour_hops(grid[:, 0], grid[:, 1]).max() == 4
