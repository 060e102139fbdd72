"""Plans by rule are plans like others: what each rank works out alone is its part of what one would write down."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout, Mesh, Packed, Shard, Spec, layout_from_spec
from remesh.layout.box_array import BoxArray, find_pairs, join_grids, sum_over_boxes
from remesh.resharding import Plan, TensorMove, Transfer, plan_reshard
from remesh.resharding.model.program import Copy
from remesh.resharding.planning import planner
from remesh.resharding.planning.rank_steps import Act
from remesh.resharding.planning.simulate import simulate_plan
from remesh.resharding.planning.transfer import PlanOptions, plan_transfer
from remesh.resharding.schedule.chunks import Chunks
from remesh.resharding.schedule.grid_rows import GridRows
from remesh.resharding.schedule.rows import Rows
from tests.unit.resharding.cases import expected_of, networks, pair_of_specs, simulate, written_out
from tests.unit.resharding.unit_tasks import compute_lower_bound, compute_tasks

_UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]


@pytest.fixture
def always_by_rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Even the smallest plan goes by rule where it can."""
    monkeypatch.setattr(planner, "_MAX_NAMED", -1)
    yield


@st.composite
def sides(draw: st.DrawFn, shape: tuple[int, ...], mesh: Mesh, num_whole: int) -> Layout:
    """Any spec that cuts something over so many axes of the hosts: where these are all, pieces lie within hosts."""
    dims: list[list[int]] = [[] for _ in shape]
    for axis in draw(st.permutations(range(mesh.ndim))):
        if axis < num_whole or draw(st.booleans()):
            dims[draw(st.integers(0, len(shape) - 1))].append(axis)
    spec = Spec(tuple(map(tuple, dims)))
    kind = draw(st.sampled_from(["even", "uneven", "packed"]))
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "packed":
        at = draw(st.integers(0, shape[dim]))
        return layout_from_spec(spec, shape, mesh, "int8", packed=[Packed(dim, (at, shape[dim] - at))])
    if kind == "uneven":
        num_parts = int(np.prod([mesh.shape[axis] for axis in dims[dim]], dtype=int))
        ends = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=num_parts - 1, max_size=num_parts - 1)))
        sizes = np.diff([0, *ends, shape[dim]]).tolist()
        return layout_from_spec(spec, shape, mesh, "int8", uneven={dim: sizes})
    return layout_from_spec(spec, shape, mesh, "int8")


@st.composite
def regular_moves(draw: st.DrawFn) -> tuple[list[TensorMove], dict[int, str]]:
    """Tensors between two meshes of hosts, apart from each other, the same, or sharing some hosts.

    Each piece is wanted within one host; some are held on several.
    """
    num_devices = draw(st.integers(1, 3))
    shapes = [(*draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)), num_devices) for _ in range(2)]
    firsts = [0, draw(st.integers(0, 1 + int(np.prod(shapes[0][:-1])))) * num_devices]
    meshes = [
        Mesh.of({f"axis{n}": size for n, size in enumerate(shape)}, range(first, first + int(np.prod(shape))))
        for shape, first in zip(shapes, firsts, strict=True)
    ]
    moves = []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
        dtype = draw(st.sampled_from(["int8", "float32", "int64"]))
        cuts = draw(st.integers(0, meshes[0].ndim - 1)), meshes[1].ndim - 1
        src, dst = (
            dataclasses.replace(draw(sides(shape, mesh, num)), dtype=dtype)
            for mesh, num in zip(meshes, cuts, strict=True)
        )
        moves.append(TensorMove(f"t{number}", src, dst))
    ranks = sorted({rank for mesh in meshes for rank in mesh.world_ranks})
    return moves, {rank: f"h{rank // num_devices:02}" for rank in ranks}


def plan_by_rule(moves: list[TensorMove], hosts: dict[int, str]) -> Plan:
    """The plan by rule, also where replicas that take turns load a host with more than the bound."""
    plan = plan_reshard(moves, hosts)
    if isinstance(plan.rows, GridRows):
        return plan
    rows = GridRows.of(plan.moves, dict(sorted(hosts.items())))
    assume(rows is not None)
    assert rows is not None
    return Plan(plan.moves, rows, tuple(rows.copies()), plan.bound)


@pytest.mark.usefixtures("always_by_rule")
@settings(suppress_health_check=_UNCHECKED)
@given(regular_moves())
def test_the_rule_brings_every_element_once_and_is_what_its_messages_say(
    case: tuple[list[TensorMove], dict[int, str]],
) -> None:
    moves, hosts = case
    plan = plan_by_rule(moves, hosts)
    arrived = simulate(plan)
    for move in moves:
        for rank in move.dst.holders:
            np.testing.assert_array_equal(arrived[move.name, int(rank)], expected_of(move, int(rank)))
    plain = written_out(plan)
    assert len(plan.messages) == len(list(plan.messages)) == len(plain.messages)
    assert plan.num_rounds >= plain.num_rounds
    for fact in ("bytes_by_pair", "nic_bytes", "ranks", "certified_ratio", "bytes_copied"):
        assert getattr(plan, fact) == getattr(plain, fact), fact
    assert plan.rows.bytes_between_hosts() == plain.rows.bytes_between_hosts()
    taken = Counter[int]()
    for (_, taker), nbytes in plain.bytes_by_pair.items():
        taken[taker] += nbytes
    assert plan.rows.bytes_taken() == dict(taken)
    assert max((chunk.nbytes for chunk in plain.chunks), default=0) <= plan.chunks.largest_bytes


@pytest.mark.usefixtures("always_by_rule")
@settings(suppress_health_check=_UNCHECKED)
@given(regular_moves())
def test_what_a_rank_works_out_alone_is_its_part_of_the_whole(case: tuple[list[TensorMove], dict[int, str]]) -> None:
    moves, hosts = case
    whole = plan_by_rule(moves, hosts)
    everything = list(whole.messages)
    for rank in hosts:
        alone = plan_by_rule(moves, hosts)
        program = alone.program_of(rank)
        assert list(program.gives) == [each for each in everything if each.giver == rank]
        assert list(program.takes) == [each for each in everything if each.taker == rank]
        assert program.copies == tuple(copy for copy in whole.copies if rank in copy.ranks)
        for message in (*program.gives, *program.takes):
            assert alone.chunks[message.chunk] == whole.chunks[message.chunk]


@pytest.mark.usefixtures("always_by_rule")
@settings(suppress_health_check=_UNCHECKED)
@given(regular_moves())
def test_the_rule_knows_bound_and_copies_of_a_plan_that_names_everything(
    case: tuple[list[TensorMove], dict[int, str]],
) -> None:
    moves, hosts = case
    plan = plan_reshard(moves, hosts)
    assume(isinstance(plan.rows, GridRows))
    assert plan.bound == compute_lower_bound(compute_tasks(moves), hosts)
    assert plan.certified_ratio == 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_MAX_NAMED", 1 << 40)
        named = plan_reshard(moves, hosts)
    assert not isinstance(named.rows, GridRows)
    assert set(named.copies) == set(plan.copies)
    assert len(named.copies) == len(plan.copies)
    assert isinstance(plan.rows, GridRows)
    if (plan.rows.givers.num_shares > 1).any():
        assert sum(named.nic_bytes.values()) == sum(plan.nic_bytes.values())
    else:
        assert named.nic_bytes == plan.nic_bytes


@pytest.mark.usefixtures("always_by_rule")
@settings(suppress_health_check=_UNCHECKED)
@given(regular_moves(), st.data())
def test_the_rule_knows_the_bound_of_a_network_and_what_uplinks_carry(
    case: tuple[list[TensorMove], dict[int, str]], data: st.DataObject
) -> None:
    moves, hosts = case
    network = data.draw(networks(sorted(set(hosts.values()))))
    plan = plan_reshard(moves, hosts, network=network)
    assume(isinstance(plan.rows, GridRows))
    expected = compute_lower_bound(compute_tasks(moves), hosts, network)
    assert (plan.bound.seconds, plan.bound.reason) == (expected.seconds, expected.reason)
    assert plan.certified_ratio == pytest.approx(1.0)
    assert dict(plan.rows.uplink_loads(network)) == written_out(plan).rows.uplink_loads(network)


@pytest.mark.usefixtures("always_by_rule")
@settings(suppress_health_check=_UNCHECKED)
@given(regular_moves(), st.integers(1, 3))
def test_nobody_waits_for_ever_and_stages_more_than_was_said(
    case: tuple[list[TensorMove], dict[int, str]], window: int
) -> None:
    moves, hosts = case
    transfer = Transfer(plan_by_rule(moves, hosts), window=window)
    steps = {rank: deque(transfer.steps_of(rank).steps) for rank in hosts}
    assert max(transfer.steps_of(rank).staging_bytes for rank in hosts) <= transfer.staging_bytes
    posted: dict[tuple[int, int], list[int]] = {}
    sent: dict[tuple[int, int], list[int]] = {}
    settled: Counter[tuple[int, int]] = Counter()
    moving = True
    while moving:
        moving = False
        for todo in steps.values():
            while todo:
                message, pair = todo[0].message, (todo[0].message.giver, todo[0].message.taker)
                theirs = posted.setdefault(pair, []), sent.setdefault(pair, [])
                if todo[0].act is Act.POST:
                    theirs[0].append(message.chunk)
                elif todo[0].act is Act.GIVE:
                    theirs[1].append(message.chunk)
                elif todo[0].act is Act.TAKE:
                    # Messages of a pair fill the buffers in the order in which these were posted.
                    at = theirs[0].index(message.chunk)
                    if len(theirs[1]) <= at:
                        break
                    assert theirs[1][at] == message.chunk
                else:
                    # Nothing is buffered: a send is over when the taker has a buffer for it.
                    if len(theirs[0]) <= settled[pair]:
                        break
                    settled[pair] += 1
                todo.popleft()
                moving = True
    assert not any(steps.values()), "ranks wait for each other"


@pytest.mark.usefixtures("always_by_rule")
@settings(suppress_health_check=_UNCHECKED)
@given(regular_moves())
def test_plans_by_rule_survive_json_and_depend_on_values_only(case: tuple[list[TensorMove], dict[int, str]]) -> None:
    moves, hosts = case
    plan = plan_by_rule(moves, hosts)
    value = plan.to_json()
    assert value["rows"] is None
    back = Plan.from_json(value)
    assert back == plan
    assert back.digest == plan.digest
    again = plan_by_rule(list(reversed(moves)), dict(reversed(hosts.items())))
    assert again.digest == plan.digest
    assert written_out(plan).digest != plan.digest or not len(plan.messages)


def _rows_to_columns(dst: str = "RS01") -> tuple[TensorMove, dict[int, str]]:
    return pair_of_specs((8, 8), ("S01R", (2, 2)), (dst, (2, 2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.pop("rows"), "a field is missing"),
        (lambda value: value.update(rows=True), "expected rows, found bool"),
        (lambda value: value["hosts"].pop(), "grids"),
        (lambda value: value["hosts"].__setitem__(0, [0, "elsewhere"]), None),
        (lambda value: value["copies"].append([0, [0, 0], [1, 1], [0]]), "copies"),
        (lambda value: value["copies"].append([1, [0, 0], [1, 1], [0]]), "plan again"),
    ],
)
@pytest.mark.usefixtures("always_by_rule")
def test_json_of_a_plan_by_rule_is_looked_at(
    change: Callable[[dict[str, object]], object], message: str | None
) -> None:
    move, hosts = _rows_to_columns()
    value = plan_reshard([move], hosts).to_json()
    change(value)
    if message is None:
        Plan.from_json(value)
        return
    with pytest.raises(PlanError, match=message):
        Plan.from_json(value)


@pytest.mark.usefixtures("always_by_rule")
def test_a_copy_that_is_left_out_is_noticed() -> None:
    move, hosts = pair_of_specs((8, 8), ("S01R", (2, 2)), ("RS01", (2, 2)))
    same = TensorMove("x", move.src, move.dst.map_holders(lambda rank: int(rank) - 4))
    plan = plan_reshard([same], {rank: hosts[rank] for rank in range(4)})
    assert isinstance(plan.rows, GridRows)
    assert len(plan.copies) == 4
    for copies in (plan.copies[1:], (*plan.copies, plan.copies[0]), (Copy(0, plan.copies[0].box, (1,)),)):
        with pytest.raises(PlanError, match=r"cop"):
            dataclasses.replace(plan, copies=copies)


def test_a_rule_for_other_moves_is_no_plan() -> None:
    (one, hosts), (other, _) = _rows_to_columns(), _rows_to_columns("RS0")
    rows = GridRows.of((one,), hosts)
    assert rows is not None
    bound = compute_lower_bound(compute_tasks([one]), hosts)
    Plan((one,), rows, (), bound)
    with pytest.raises(PlanError, match="other moves"):
        Plan((other,), rows, (), bound)


@pytest.mark.usefixtures("always_by_rule")
@pytest.mark.parametrize("column", ["givers", "takers", "hop_giver", "hop_taker", "hop_time", "chunks"])
def test_each_rank_has_the_rows_that_it_works_out_checked(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the rule itself were wrong: a part that lacks a chunk, or has another column."""
    move, hosts = _rows_to_columns("RS0")
    plan = plan_reshard([move], hosts)
    assert isinstance(plan.rows, GridRows)
    right = plan.rows.part_of(4)
    plan.program_of(4)
    if column == "chunks":
        wrong = dataclasses.replace(right.rows, **_first_chunks(right.rows, len(right.rows.givers) - 1))
    else:
        other = 1 - np.minimum(getattr(right.rows, column), 1)
        wrong = dataclasses.replace(right.rows, **{column: other})  # type: ignore[arg-type]
    monkeypatch.setattr(plan.rows, "part_of", lambda rank: dataclasses.replace(right, rows=wrong))
    with pytest.raises(PlanError, match="checking a reshard plan"):
        plan.program_of(4)


def _first_chunks(rows: Rows, count: int) -> dict[str, Any]:
    parts = rows.chunks.parts.take(np.arange(rows.chunks.first_part[count]))
    names = ("givers", "takers", "hop_giver", "hop_taker", "hop_time")
    return {
        "chunks": Chunks(parts, rows.chunks.first_part[: count + 1]),
        **{name: getattr(rows, name)[:count] for name in names},
        "first_chunk": np.arange(count + 1),
        "first_hop": np.arange(count + 1),
    }


def _whole(shape: tuple[int, ...], *ranks: int) -> tuple[Shard, ...]:
    return tuple(Shard(rank, Box.of_shape(shape)) for rank in ranks)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (_whole((4,), 0), _whole((4,), 4, 6)),  # several receivers, who pass on
        (_whole((4,), 0), (Shard(4, Box((0,), (2,))),)),  # some of it is wanted by nobody
        ((Shard(0, Box((0,), (2,))), Shard(1, Box((2,), (9,)))), _whole((4,), 4)),  # a piece beyond the tensor
    ],
)
def test_moves_that_have_to_be_passed_on_or_leave_holes_do_not_go_by_rule(
    src: tuple[Shard, ...], dst: tuple[Shard, ...]
) -> None:
    move = TensorMove("w", Layout((4,), src, "int8"), Layout((4,), dst, "int8"))
    assert GridRows.of((move,), {rank: f"h{rank // 2}" for rank in range(8)}) is None


@pytest.mark.usefixtures("always_by_rule")
@pytest.mark.parametrize(("num_takers", "loads"), [(4, [24, 24]), (3, [32, 16])])
def test_replicas_on_several_hosts_take_turns_unless_that_is_more_than_one_has_to_send(
    num_takers: int, loads: list[int]
) -> None:
    """A row of 12 on two hosts, wanted in as many columns as there are other hosts: senders are the bound."""
    width = 12 // num_takers
    wanted = [Shard(4 + n, Box((n * width,), (n * width + width,))) for n in range(num_takers)]
    move = TensorMove("w", Layout((12,), _whole((12,), *range(4)), "int32"), Layout((12,), tuple(wanted), "int32"))
    hosts = {rank: "ab"[rank // 2] for rank in range(4)} | {4 + n: f"c{n}" for n in range(num_takers)}
    rows = GridRows.of((move,), hosts)
    assert rows is not None
    assert list(rows.loads.sent.values()) == loads
    assert rows.loads.owned == {("a", "b"): 48}
    plan = plan_reshard([move], hosts)
    assert isinstance(plan.rows, GridRows) == (max(loads) == 24)
    assert plan.certified_ratio == 1.0


@pytest.mark.usefixtures("always_by_rule")
def test_a_replica_beside_the_taker_gives_to_it() -> None:
    """Of a row on two hosts each wants one half: nothing leaves its host."""
    wanted = (Shard(1, Box((0,), (6,))), Shard(3, Box((6,), (12,))))
    move = TensorMove("w", Layout((12,), _whole((12,), 0, 2), "int8"), Layout((12,), wanted, "int8"))
    plan = plan_reshard([move], {rank: "ab"[rank // 2] for rank in range(4)})
    assert isinstance(plan.rows, GridRows)
    assert {(message.giver, message.taker) for message in plan.messages} == {(0, 1), (2, 3)}
    assert plan.nic_bytes == {}


@pytest.mark.usefixtures("always_by_rule")
def test_a_cap_on_staging_holds_for_plans_by_rule() -> None:
    move, hosts = pair_of_specs((64, 64), ("S01R", (2, 2)), ("RS01", (2, 2)))
    options: PlanOptions = {"max_staging_bytes": 8 << 10}
    transfer = plan_transfer([move], hosts, options)
    assert isinstance(transfer.plan.rows, GridRows)
    assert max(transfer.steps_of(rank).staging_bytes for rank in hosts) <= transfer.staging_bytes <= 8 << 10
    with pytest.raises(PlanError, match="max_staging_bytes"):
        plan_transfer([move], hosts, {"max_staging_bytes": 100, "chunk_bytes": 4096})


@given(st.data())
def test_grids_are_joined_without_listing_their_pairs(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    grids = []
    for _ in range(2):
        mesh = Mesh.of({"a": data.draw(st.integers(1, 4)), "b": data.draw(st.integers(1, 3)), "c": 1})
        grids.append(data.draw(sides(shape, mesh, 2)).atoms.boxes)
    a, b = grids
    joined = join_grids(a, b)
    at_a, at_b = find_pairs(a, b)
    assert joined is not None
    shared = BoxArray(np.maximum(a.starts[at_a], b.starts[at_b]), np.minimum(a.stops[at_a], b.stops[at_b]))
    assert (joined.num_pairs, joined.largest) == (len(at_a), shared.sizes.max())
    np.testing.assert_array_equal(joined.met, np.bincount(at_b, minlength=len(b)))
    values = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(b), max_size=len(b))), dtype=np.int64)
    sums = np.zeros(len(a), dtype=np.int64)
    np.add.at(sums, at_a, shared.sizes * values[at_b])
    np.testing.assert_array_equal(sum_over_boxes(a, b, values), sums)


@pytest.mark.parametrize(
    ("shape", "src", "dst", "num_cuts"),
    [
        ((500, 450), ("S01R", (7, 4)), ("RS01", (9, 4)), 1),
        ((500, 450), ("S01R", (8, 4)), ("RS0", (15, 4)), 1),
        ((97, 81), ("S0S1", (15, 4)), ("S1S0", (11, 4)), 1),
        ((300, 200), ("S0R", (30, 2)), ("RS0", (27, 2)), 1),
        # Hosts cut in two, and in four: each piece of the source is held on several.
        ((512, 512), ("S0R", (16, 4)), ("RS01", (16, 4)), 2),
        ((500, 450), ("S0R", (15, 4)), ("RS01", (13, 4)), 2),
        ((512, 512), ("S0R", (16, 4)), ("RS01", (16, 4)), 4),
    ],
)
def test_the_rule_takes_no_longer_than_rows_between_hosts(
    shape: tuple[int, ...], src: tuple[str, tuple[int, int]], dst: tuple[str, tuple[int, int]], num_cuts: int
) -> None:
    move, hosts = pair_of_specs(shape, src, dst)
    hosts = {rank: f"{host}.{rank % num_cuts}" for rank, host in hosts.items()}
    seconds = []
    for limits in ({"_MAX_NAMED": -1}, {"_MAX_NAMED": 1 << 40, "_MAX_TIMED": -1}):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in limits.items():
                patch.setattr(planner, name, value)
            plan = plan_reshard([move], hosts)
        assert isinstance(plan.rows, GridRows if "_MAX_TIMED" not in limits else Rows)
        seconds.append(simulate_plan(plan).total_s)
    assert seconds[0] <= seconds[1]


def test_stages_of_a_pipeline_do_not_make_each_others_streams_long() -> None:
    # Sixteen tensors on two hosts each, all apart: no stream has more than one of them.
    moves: list[TensorMove] = []
    hosts: dict[int, str] = {}
    move, _ = pair_of_specs((8, 8), ("S01R", (1, 2)), ("RS01", (1, 2)))
    for number in range(16):
        sides = [side.map_holders({rank: 4 * number + rank for rank in range(4)}) for side in (move.src, move.dst)]
        moves.append(TensorMove(f"t{number:02}", sides[0], sides[1]))
        hosts |= {4 * number + rank: f"h{2 * number + rank // 2:02}" for rank in range(4)}
    rows = GridRows.of(tuple(moves), hosts)
    assert rows is not None
    assert rows.largest_bytes == 4 * 4 * 4
    assert GridRows.of(tuple(moves), hosts, most_bytes=63) is None


def test_a_thousand_hosts_are_planned_by_rule_and_every_rank_knows_its_part() -> None:
    # Rows to columns between 2 x 64 hosts of eight devices: a quarter of a million slices, of which a rank has 1,024.
    move, hosts = pair_of_specs((1024, 512), ("S01R", (64, 8)), ("RS01", (64, 8)))
    plan = plan_reshard([move], hosts)
    assert isinstance(plan.rows, GridRows)
    assert len(plan.messages) == 512 * 512
    for rank in (0, 700, 1023):
        program = plan.program_of(rank)
        assert len(program.gives) + len(program.takes) == 512
    assert plan.certified_ratio == 1.0
