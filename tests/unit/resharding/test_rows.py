"""Rows stand for messages: those between hosts say what rows of every single message say, and one check knows both."""

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
from remesh.resharding.schedule import rows as rows_module
from remesh.resharding.schedule.chunks import Chunks, PartRows
from remesh.resharding.schedule.host_rows import colour_hops, compute_waiting
from remesh.resharding.schedule.rows import Ends, Rows
from tests.unit.resharding.cases import expected_of, host_maps, move_lists, pair_of_specs, simulate, written_out

_UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture
def always_by_hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Even the smallest plan has rows between hosts, and makes the messages of each rank by itself."""
    monkeypatch.setattr(planner, "_MAX_TIMED", -1)
    monkeypatch.setattr(rows_module, "_MAX_KEPT", 0)
    yield


def rows_of(plan: Plan, ends: Ends = Ends.HOSTS) -> Rows:
    assert isinstance(plan.rows, Rows)
    assert plan.rows.ends is ends
    return plan.rows


@pytest.mark.usefixtures("always_by_hosts")
@settings(suppress_health_check=_UNCHECKED)
@given(st.data())
def test_rows_bring_every_element_once_and_say_the_same_as_their_messages(data: st.DataObject) -> None:
    moves = data.draw(move_lists())
    hosts = data.draw(host_maps(moves))
    plan = plan_reshard(moves, hosts, chunk_bytes=data.draw(st.sampled_from([64, 256, 4096])))
    rows = rows_of(plan)
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
    assert rows.bytes_taken() == rows_of(plain, Ends.RANKS).bytes_taken() == taken
    assert rows.bytes_between_hosts() == plain.rows.bytes_between_hosts()
    for rank in hosts:
        for program in (plan.program_of(rank), plain.program_of(rank)):
            assert program.copies == tuple(copy for copy in plan.copies if rank in copy.ranks)
            assert list(program.gives) == [message for message in plain.messages if message.giver == rank]
            assert list(program.takes) == [message for message in plain.messages if message.taker == rank]


@pytest.mark.usefixtures("always_by_hosts")
@settings(suppress_health_check=_UNCHECKED)
@given(st.data())
def test_rows_survive_json_and_depend_on_values_only(data: st.DataObject) -> None:
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
    assert isinstance(plan.rows, Rows)
    return dataclasses.replace(plan, rows=dataclasses.replace(plan.rows, **columns))  # type: ignore[arg-type]


def _changed(name: str, at: int, by: int) -> Callable[[Plan, Rows], Plan]:
    def damage(plan: Plan, rows: Rows) -> Plan:
        column = getattr(rows, name).copy()
        column[at] += by
        return _with(plan, **{name: column})

    return damage


def _with_parts(plan: Plan, rows: Rows, **columns: object) -> Plan:
    parts = dataclasses.replace(rows.chunks.parts, **columns)
    return _with(plan, chunks=Chunks(parts, rows.chunks.first_part))


def _moved_part(plan: Plan, rows: Rows) -> Plan:
    parts, step = rows.chunks.parts, np.array([1, 0])
    return _with_parts(plan, rows, starts=parts.starts + step, stops=parts.stops + step)


def _without_last_flow(plan: Plan, rows: Rows) -> Plan:
    chunks, hops = int(rows.first_chunk[-2]), int(rows.first_hop[-2])
    num_parts = int(rows.chunks.first_part[chunks])
    parts = rows.chunks.parts.take(np.arange(num_parts))
    return _with(
        plan,
        chunks=Chunks(parts, rows.chunks.first_part[: chunks + 1]),
        givers=rows.givers[:chunks],
        takers=rows.takers[:chunks],
        first_chunk=rows.first_chunk[:-1],
        first_hop=rows.first_hop[:-1],
        hop_giver=rows.hop_giver[:hops],
        hop_taker=rows.hop_taker[:hops],
        hop_time=rows.hop_time[:hops],
    )


def _twice(plan: Plan, rows: Rows) -> Plan:
    num_chunks, num_hops = len(rows.givers), len(rows.hop_giver)
    joined = {name: np.tile(getattr(rows, name), 2) for name in ("givers", "takers", "hop_giver", "hop_taker")}
    times = np.concatenate((rows.hop_time, rows.hop_time + rows.period))
    first_part = np.concatenate((rows.chunks.first_part, rows.chunks.first_part[1:] + len(rows.chunks.parts)))
    return _with(
        plan,
        chunks=Chunks(PartRows.joined([rows.chunks.parts] * 2), first_part),
        hop_time=times,
        period=2 * rows.period,
        first_chunk=np.concatenate((rows.first_chunk, rows.first_chunk[1:] + num_chunks)),
        first_hop=np.concatenate((rows.first_hop, rows.first_hop[1:] + num_hops)),
        **joined,
    )


DAMAGES: dict[str, Callable[[Plan, Rows], Plan]] = {
    "a flow is lost": _without_last_flow,
    "everything twice": _twice,
    "a copy is lost": lambda plan, rows: dataclasses.replace(plan, copies=()),
    "a copy twice": lambda plan, rows: dataclasses.replace(plan, copies=plan.copies * 2),
    "a copy of what arrives": lambda plan, rows: dataclasses.replace(
        plan, copies=(dataclasses.replace(plan.copies[0], box=Box((0, 0), (16, 4))),)
    ),
    "all times equal": lambda plan, rows: _with(plan, hop_time=np.zeros_like(rows.hop_time)),
    "a time below 0": _changed("hop_time", 0, -99),
    "a time without bound": _changed("hop_time", 0, 1 << 40),
    "a relay before it takes": lambda plan, rows: _with(plan, hop_time=rows.hop_time % rows.period),
    "times that fall together": lambda plan, rows: _with(plan, period=1),
    "a period of nothing": lambda plan, rows: _with(plan, period=0),
    "a copy of what nobody wants": lambda plan, rows: dataclasses.replace(
        plan, copies=(dataclasses.replace(plan.copies[0], ranks=(0,)),)
    ),
    "other givers": lambda plan, rows: _with(plan, givers=rows.takers),
    "other takers": lambda plan, rows: _with(plan, takers=rows.takers[::-1].copy()),
    "a rank set that is not there": _changed("givers", 0, 99),
    "a host that is not there": _changed("hop_taker", 0, 99),
    "a hop from a host that has nothing": lambda plan, rows: _with(plan, hop_giver=(rows.hop_giver + 1) % 4),
    "hops in a ring": lambda plan, rows: _with(plan, hop_giver=rows.hop_taker[::-1].copy()),
    "hops of another flow": _changed("first_hop", 1, 1),
    "chunks of another flow": _changed("first_chunk", 1, -1),
    "ranks that go down": lambda plan, rows: _with(plan, rank_sets=tuple(r[::-1] for r in rows.rank_sets)),
    "a rank without host": lambda plan, rows: _with(plan, rank_sets=(*rows.rank_sets[:-1], (77,))),
    "an empty rank set": lambda plan, rows: _with(plan, rank_sets=((), *rows.rank_sets[1:])),
    "a rank gives to itself": lambda plan, rows: _with(plan, ends=Ends.RANKS),
    "parts elsewhere": _moved_part,
    "empty parts": lambda plan, rows: _with_parts(plan, rows, stops=rows.chunks.parts.starts),
    "parts of other bytes": lambda plan, rows: _with_parts(plan, rows, nbytes=rows.chunks.parts.nbytes + 1),
    "parts of another tensor": lambda plan, rows: _with_parts(plan, rows, tensor=rows.chunks.parts.tensor + 1),
    "parts of other dims": lambda plan, rows: _with_parts(plan, rows, starts=rows.chunks.parts.starts[:, :1]),
}


@pytest.mark.usefixtures("always_by_hosts")
@pytest.mark.parametrize("damage", DAMAGES, ids=DAMAGES)
def test_a_damaged_plan_of_rows_between_hosts_cannot_be_made(damage: str) -> None:
    plan = _base_plan()
    with pytest.raises(PlanError, match="checking a reshard plan"):
        DAMAGES[damage](plan, rows_of(plan))


@pytest.mark.parametrize("ends", Ends)
def test_a_copy_of_as_many_elements_elsewhere_is_refused(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 holds all and wants the first half: it may not copy the other half, though that is as much."""
    monkeypatch.setattr(planner, "_MAX_TIMED", -1 if ends is Ends.HOSTS else 1 << 40)
    low, high = Box((0,), (4,)), Box((4,), (8,))
    src = Layout((8,), (Shard(0, Box((0,), (8,))),), "int8")
    dst = Layout((8,), (Shard(0, low), Shard(1, high)), "int8")
    plan = plan_reshard([TensorMove("w", src, dst)], {0: "a", 1: "b"})
    rows_of(plan, ends)
    with pytest.raises(PlanError, match=r"rank.* copies \[4:8\].*wants"):
        dataclasses.replace(plan, copies=(dataclasses.replace(plan.copies[0], box=high),))


@pytest.mark.usefixtures("always_by_hosts")
@pytest.mark.parametrize("tensor", range(3))
def test_a_damage_of_one_of_many_tensors_of_one_layout_is_seen(tensor: int) -> None:
    plan = _base_plan("uvw")
    rows = rows_of(plan)
    parts = rows.chunks.parts
    step = (parts.tensor == tensor)[:, None] * np.array([1, 0])
    others = tuple(copy for copy in plan.copies if copy.tensor != tensor)
    assert len(others) < len(plan.copies)
    larger = dataclasses.replace(plan.copies[0], tensor=tensor, box=Box((0, 0), (16, 4)))
    for damage in (
        lambda: _with_parts(plan, rows, starts=parts.starts + step, stops=parts.stops + step),
        lambda: _with_parts(plan, rows, starts=parts.starts - step, stops=parts.stops - step),
        lambda: dataclasses.replace(plan, copies=others),
        lambda: dataclasses.replace(plan, copies=(*others, larger)),
    ):
        with pytest.raises(PlanError, match="checking a reshard plan"):
            damage()


@pytest.mark.parametrize("ends", Ends)
@settings(suppress_health_check=_UNCHECKED)
@given(data=st.data())
def test_what_the_check_lets_through_brings_every_element_once(ends: Ends, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_MAX_TIMED", -1)
        plan = _base_plan()
    plan = plan if ends is Ends.HOSTS else written_out(plan)
    columns = {}
    names = ["givers", "takers", "first_chunk", "first_hop", "hop_giver", "hop_taker", "hop_time"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        column = columns[name] = getattr(rows_of(plan, ends), name).copy()
        for _ in range(data.draw(st.integers(1, 2))):
            column[data.draw(st.integers(0, len(column) - 1))] = data.draw(st.integers(0, 6))
    try:
        changed = _with(plan, **columns)
    except PlanError:
        return
    arrived = simulate(changed)
    for move in changed.moves:
        for rank in move.dst.holders:
            np.testing.assert_array_equal(arrived[move.name, int(rank)], expected_of(move, int(rank)))


@pytest.mark.usefixtures("always_by_hosts")
@given(st.data())
@settings(suppress_health_check=_UNCHECKED)
def test_json_of_rows_with_any_field_replaced_is_refused_or_a_plan(data: st.DataObject) -> None:
    value = _base_plan().to_json()
    junk = st.one_of(st.none(), st.integers(-2, 99), st.text(max_size=3), st.lists(st.integers(-1, 9), max_size=4))
    rows = value["rows"]
    key = data.draw(st.sampled_from(sorted(rows)))
    target = rows[key]
    if data.draw(st.booleans()) or not isinstance(target, list) or not target:
        rows[key] = data.draw(junk)
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


@pytest.mark.parametrize("version", [1, 2, 3])
def test_plans_of_earlier_versions_are_refused_by_name(version: int) -> None:
    value = _base_plan().to_json() | {"version": version}
    with pytest.raises(PlanError, match=rf"reading a plan: found \('remesh.plan', {version}\).* version 4"):
        Plan.from_json(value)


def test_a_large_plan_is_rows_between_hosts_and_each_rank_makes_its_own_messages() -> None:
    move, hosts = pair_of_specs((1920, 1024), ("S01R", (24, 8)), ("RS1", (24, 8)))
    plan = plan_reshard([move], hosts)
    rows = rows_of(plan)
    assert len(plan.messages) == 24 * 8 * 8 * 24
    assert plan.certified_ratio == 1.0
    everything = plan.messages.columns
    for rank in (0, 100, 192, 300, 383):
        gives, takes = rows.of_rank(rank)
        for mine, whose in ((gives, everything.giver), (takes, everything.taker)):
            assert mine.messages() == everything.take(np.flatnonzero(whose == rank)).messages()
    transfer = plan_transfer([move], hosts, {})
    assert transfer.steps_of(200).staging_bytes > 0
    assert len(transfer.ranks) == 384


@pytest.mark.parametrize("pair", ["S0R>RS0", "S01R>RS0", "S0S1>S1S0", "RS1>S01R", "S0R>RR", "S01R>RS1"])
def test_rows_between_hosts_keep_all_nics_busy_on_uneven_meshes_too(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert compute_waiting(rows_of(even)) == 1.0
    monkeypatch.setattr(planner, "_MAX_WAITING", 0.99)
    rows_of(plan_reshard([move], hosts), Ends.RANKS)


def test_hosts_that_wait_for_each_other_are_seen() -> None:
    # Two hosts give to two others; what one of them has to give first is what the other taker waits for.
    move, hosts = pair_of_specs((9, 64), ("S0R", (2, 1)), ("RS0", (2, 1)))
    plan = plan_reshard([move], hosts)
    rows = host_rows_of(plan)
    assert compute_waiting(rows) == pytest.approx(1.0)
    assert compute_waiting(dataclasses.replace(rows, hop_time=np.array([0, 1, 2, 3]), period=4)) > 1.3


def host_rows_of(plan: Plan) -> Rows:
    """The rows between hosts that the same moves make when they must."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_MAX_TIMED", -1)
        return rows_of(plan_reshard(plan.moves, plan.host_of))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=60))
def test_no_two_hops_out_of_or_into_a_host_have_one_colour(pairs: list[tuple[int, int]]) -> None:
    giver, taker = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    colours = colour_hops(giver, taker).tolist()
    for side in (giver.tolist(), taker.tolist()):
        assert len(set(zip(side, colours, strict=True))) == len(pairs)


def test_even_traffic_needs_no_more_colours_than_a_host_has_hops() -> None:
    grid = np.array([(a, 5 + b) for a in range(5) for b in range(5)])
    assert colour_hops(grid[:, 0], grid[:, 1]).max() == 4
