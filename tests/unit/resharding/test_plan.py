"""Plans bring every wanted element to its taker, once, by ranks that have it, and near the bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout, Shard, compute_missing
from remesh.resharding import Message, Missing, Plan, TensorMove, plan_reshard
from remesh.resharding.schedule.chunks import Chunk, Chunks
from remesh.resharding.schedule.message_rows import Columns
from remesh.resharding.schedule.rows import Rows
from tests.unit.resharding.cases import (
    expected_of,
    host_maps,
    move_lists,
    nic_loads,
    pair_of_specs,
    ranks_of,
    simulate,
)

# Table 2 of arXiv 2211.05322, with the tensor scaled down: specs, meshes, bound in tensors per NIC.
TABLE_2 = {
    "1": ((64, 64, 32), ("S0RR", (2, 4)), ("S0RR", (2, 4)), 0.5),
    "2": ((64, 64, 32), ("RRR", (2, 4)), ("S0RR", (2, 4)), 0.5),
    "3": ((64, 64, 32), ("RS0R", (2, 4)), ("S0RR", (2, 4)), 0.5),
    "4": ((64, 64, 32), ("RS01R", (2, 4)), ("S01RR", (2, 4)), 0.5),
    "5": ((64, 64, 32), ("S1RR", (2, 4)), ("S0RR", (2, 4)), 0.5),
    "6": ((192, 64, 10), ("S0RR", (2, 4)), ("S0RR", (3, 4)), 0.5),
    "7": ((64, 64, 32), ("S1RR", (1, 4)), ("RRR", (2, 4)), 1.0),
    "9": ((64, 64, 32), ("RS0R", (2, 4)), ("RRS0", (2, 4)), 0.5),
}


@given(st.data())
def test_every_wanted_element_arrives_once_from_someone_who_has_it(data: st.DataObject) -> None:
    moves = data.draw(move_lists())
    plan = plan_reshard(moves, data.draw(host_maps(moves)), chunk_bytes=data.draw(st.sampled_from([64, 256, 4096])))
    arrived = simulate(plan)
    for move in moves:
        for rank in move.dst.holders:
            np.testing.assert_array_equal(arrived[move.name, int(rank)], expected_of(move, int(rank)))


@given(st.data())
def test_what_nobody_holds_is_refused_or_left_alone(data: st.DataObject) -> None:
    moves = data.draw(move_lists(complete=False))
    hosts = data.draw(host_maps(moves))
    missing = {move.name: boxes for move in moves if (boxes := compute_missing(move.src, move.dst))}
    if missing:
        with pytest.raises(PlanError, match=min(missing)):
            plan_reshard(moves, hosts)
    plan = plan_reshard(moves, hosts, missing=Missing.LEAVE, chunk_bytes=64)
    assert plan.missing == missing
    arrived = simulate(plan)
    for move in moves:
        for rank in move.dst.holders:
            np.testing.assert_array_equal(arrived[move.name, int(rank)], expected_of(move, int(rank)))


def test_a_name_that_nobody_gives_is_told_with_the_nearest_that_somebody_gives() -> None:
    some = Layout((4,), (Shard(0, Box((0,), (4,))),), "float32")
    none = dataclasses.replace(some, shards=())
    moves = [TensorMove("weight", some, none), TensorMove("weigth", none, some)]
    with pytest.raises(
        PlanError, match=r"no rank gives elements of that name; did you mean 'weight'\? 4 of 4 .*\[0:4\]"
    ):
        plan_reshard(moves, {0: "a", 1: "a"})
    # What is given and wanted is spelt as it should be: the other one is not a slip, it is lost.
    with pytest.raises(PlanError, match="no rank gives elements of that name; 4 of 4 elements are wanted"):
        plan_reshard([TensorMove("layers.0", some, some), TensorMove("layers.1", none, some)], {0: "a"})


@given(st.data())
def test_nothing_crosses_into_a_host_twice_or_without_need(data: st.DataObject) -> None:
    moves = data.draw(move_lists())
    hosts = data.draw(host_maps(moves))
    plan = plan_reshard(moves, hosts, chunk_bytes=64)
    needed = 0
    for move in moves:
        for host in set(hosts.values()):
            inside = [rank for rank in ranks_of(moves) if hosts[rank] == host]
            wanted = {i for rank in inside for i in expected_of(move, rank).tolist()} - {-1}
            held = {i for rank in inside for i in _held(move, rank)}
            needed += len(wanted - held) * move.src.itemsize_bytes
    loads = nic_loads(plan, hosts)
    assert sum(nbytes for (_, way), nbytes in loads.items() if way == "in") == needed
    assert max(loads.values(), default=0) == plan.busiest_nic_bytes >= plan.lower_bound_bytes


def _held(move: TensorMove, rank: int) -> set[int]:
    own = TensorMove(move.name, move.src.restrict([rank]), move.src.restrict([rank]))
    return set(expected_of(own, rank).tolist()) - {-1}


@given(st.data())
def test_the_plan_survives_json_and_depends_on_values_only(data: st.DataObject) -> None:
    moves = data.draw(move_lists())
    hosts = data.draw(host_maps(moves))
    plan = plan_reshard(moves, hosts, chunk_bytes=256)
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert back.digest == plan.digest
    copies = [TensorMove(m.name, _rebuilt(m.src), _rebuilt(m.dst)) for m in reversed(moves)]
    again = plan_reshard(copies, dict(reversed(hosts.items())), chunk_bytes=256)
    assert again.digest == plan.digest


def _rebuilt(layout: Layout) -> Layout:
    return Layout(layout.global_shape, tuple(dataclasses.replace(shard) for shard in layout.shards), layout.dtype)


@pytest.mark.parametrize("case", TABLE_2, ids=[f"case {name}" for name in TABLE_2])
def test_the_cases_of_the_paper_are_planned_at_their_bound(case: str) -> None:
    shape, src, dst, bound = TABLE_2[case]
    move, hosts = pair_of_specs(shape, src, dst)
    plan = plan_reshard([move], hosts)
    assert plan.lower_bound_bytes == bound * move.src.nbytes
    assert plan.certified_ratio <= 1.005


def test_replicas_share_the_sending_where_whole_slices_could_not() -> None:
    # Three equal slices, two hosts that hold all of them, three receivers: unsplit senders need 2 slices, not 1.5.
    whole = Box((0,), (3072,))
    thirds = [Box((1024 * n,), (1024 * n + 1024,)) for n in range(3)]
    src = Layout((3072,), (Shard(0, whole), Shard(1, whole)), "int8")
    dst = Layout((3072,), tuple(Shard(2 + n, box) for n, box in enumerate(thirds)), "int8")
    plan = plan_reshard([TensorMove("x", src, dst)], {rank: f"h{rank}" for rank in range(5)})
    assert plan.lower_bound_bytes == 1536
    assert plan.busiest_nic_bytes <= 1536 * 1.005


def test_triangle_of_multicasts_needs_two_slices_per_nic() -> None:
    # Slices to {1, 2}, {2, 3}, {1, 3}: exclusive multicasts take 3 units in any order, the bound is 2.
    parts = [Box((1000 * n,), (1000 * n + 1000,)) for n in range(3)]
    src = Layout((3000,), tuple(Shard(10 + n, box) for n, box in enumerate(parts)), "int8")
    wants = {1: (0, 2), 2: (0, 1), 3: (1, 2)}
    dst = Layout((3000,), tuple(Shard(rank, parts[n]) for rank, pair in wants.items() for n in pair), "int8")
    plan = plan_reshard([TensorMove("x", src, dst)], {rank: f"h{rank}" for rank in (1, 2, 3, 10, 11, 12)})
    assert plan.lower_bound_bytes == plan.busiest_nic_bytes == 2000


def test_survivors_that_hold_and_want_share_the_sending_with_those_who_only_want() -> None:
    # A mesh grows from 2 hosts to 4, all of them replicas: the two newcomers can pass on what they get.
    whole = Box((0,), (4096,))
    src = Layout((4096,), (Shard(0, whole),), "int8")
    dst = Layout((4096,), tuple(Shard(rank, whole) for rank in range(4)), "int8")
    plan = plan_reshard([TensorMove("x", src, dst)], {rank: f"h{rank}" for rank in range(4)})
    assert plan.certified_ratio == 1.0
    assert plan.bytes_copied == 4096


def test_many_small_tensors_travel_in_few_messages() -> None:
    moves = []
    for number in range(200):
        shape = (8 * (1 + number % 7), 16)
        rows = [Box((shape[0] * n // 4, 0), (shape[0] * (n + 1) // 4, 16)) for n in range(4)]
        columns = [Box((0, 4 * n), (shape[0], 4 * n + 4)) for n in range(4)]
        src = Layout(shape, tuple(Shard(n, box) for n, box in enumerate(rows)), "float32")
        dst = Layout(shape, tuple(Shard(n, box) for n, box in enumerate(columns)), "float32")
        moves.append(TensorMove(f"t{number:03d}", src, dst))
    plan = plan_reshard(moves, {rank: f"h{rank}" for rank in range(4)})
    assert len(plan.messages) == 12
    assert plan.num_rounds == 3


def test_a_chain_of_relays_keeps_all_its_links_busy() -> None:
    whole = Box((0,), (1 << 24,))
    src = Layout((1 << 24,), (Shard(0, whole),), "int8")
    dst = Layout((1 << 24,), tuple(Shard(rank, whole) for rank in range(1, 5)), "int8")
    plan = plan_reshard([TensorMove("x", src, dst)], {rank: f"h{rank}" for rank in range(5)})
    assert plan.certified_ratio == 1.0
    num_chunks = len(plan.chunks)
    assert plan.num_rounds <= num_chunks + 4  # pipelined broadcast: K + A - 1 rounds


def test_within_a_host_chunks_that_are_passed_on_are_long() -> None:
    """No link waits for them there, and each costs its ranks a wake-up."""
    whole = Box((0,), (1 << 25,))
    src = Layout(whole.stop, (Shard(0, whole),), "int8")
    dst = Layout(whole.stop, tuple(Shard(rank, whole) for rank in range(1, 4)), "int8")
    plan = plan_reshard([TensorMove("x", src, dst)], dict.fromkeys(range(4), "here"))
    assert {chunk.nbytes for chunk in plan.chunks} == {2 << 20}
    assert len(plan.messages) == 3 * len(plan.chunks) == 48


def _base_plan() -> Plan:
    parts = [Box((n,), (n + 2,)) for n in (0, 2, 4)]
    src = Layout((6,), tuple(Shard(n, box) for n, box in enumerate(parts)), "int16")
    whole = Box((0,), (6,))
    dst = Layout((6,), (Shard(1, whole), Shard(3, whole), Shard(4, whole)), "int16")
    return plan_reshard([TensorMove("w", src, dst)], {rank: f"h{rank}" for rank in range(5)})


def _with_messages(plan: Plan, messages: Sequence[Message], chunks: Sequence[Chunk] | None = None) -> Plan:
    """The plan with other messages or chunks."""
    ends = np.array([(m.round, m.giver, m.taker, m.chunk) for m in messages], dtype=np.int64).reshape(-1, 4)
    made = Chunks.of(tuple(plan.chunks) if chunks is None else chunks, tuple(move.src.ndim for move in plan.moves))
    return dataclasses.replace(plan, rows=Rows.of_messages(plan.host_of, made, Columns(*ends.T)))


def _change_message(plan: Plan, at: int, **fields: int) -> Plan:
    messages = list(plan.messages)
    messages[at] = dataclasses.replace(messages[at], **fields)
    return _with_messages(plan, messages)


def _change_part(plan: Plan, box: Box, nbytes: int | None = None) -> Plan:
    part = dataclasses.replace(plan.chunks[0].parts[0], box=box, nbytes=box.size * 2 if nbytes is None else nbytes)
    return _with_messages(plan, plan.messages, (Chunk((part,), part.nbytes), *plan.chunks[1:]))


def _without_host(plan: Plan, rank: int) -> Plan:
    """The plan in rows that know no host of this rank."""
    others = {each: host for each, host in plan.host_of.items() if each != rank}
    assert isinstance(plan.rows, Rows)
    return dataclasses.replace(plan, rows=dataclasses.replace(plan.rows, host_of=others))


DAMAGES: dict[str, Callable[[Plan], Plan]] = {
    "a message is lost": lambda plan: _with_messages(plan, plan.messages[:-1]),
    "a message comes twice": lambda plan: _with_messages(
        plan, [*plan.messages, Message(99, plan.messages[-1].giver, plan.messages[-1].taker, 0)]
    ),
    "a copy is lost": lambda plan: dataclasses.replace(plan, copies=()),
    "a copy comes twice": lambda plan: dataclasses.replace(plan, copies=plan.copies * 2),
    "a copy by one who lacks it": lambda plan: dataclasses.replace(
        plan, copies=(dataclasses.replace(plan.copies[0], ranks=(3,)),)
    ),
    "a copy of a tensor that is not there": lambda plan: dataclasses.replace(
        plan, copies=(dataclasses.replace(plan.copies[0], tensor=7),)
    ),
    "an empty copy": lambda plan: dataclasses.replace(
        plan, copies=(*plan.copies, dataclasses.replace(plan.copies[0], box=Box((0,), (0,))))
    ),
    "a rank gives to itself": lambda plan: _change_message(plan, 0, taker=plan.messages[0].giver),
    "a rank gives what it lacks": lambda plan: _change_message(plan, 0, giver=2 if plan.messages[0].giver != 2 else 0),
    "everything in one round": lambda plan: _with_messages(
        plan, [dataclasses.replace(message, round=0) for message in plan.messages]
    ),
    "a rank without host": lambda plan: _without_host(plan, 3),
    "a part outside the tensor": lambda plan: _change_part(plan, Box((5,), (9,))),
    "an empty part": lambda plan: _change_part(plan, Box((0,), (0,))),
    "a wrong chunk size": lambda plan: _change_part(plan, plan.chunks[0].parts[0].box, 1),
    "a tensor twice": lambda plan: dataclasses.replace(plan, moves=plan.moves * 2),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=DAMAGES)
def test_a_damaged_plan_cannot_be_made(damage: str) -> None:
    with pytest.raises(PlanError, match="checking a reshard plan"):
        DAMAGES[damage](_base_plan())


def test_a_relay_cannot_forward_in_the_round_in_which_it_takes() -> None:
    whole = Box((0,), (64,))
    src = Layout((64,), (Shard(0, whole),), "int8")
    dst = Layout((64,), tuple(Shard(rank, whole) for rank in (1, 2, 3)), "int8")
    plan = plan_reshard([TensorMove("w", src, dst)], {rank: f"h{rank}" for rank in range(4)})
    took = {(message.taker, message.chunk): message.round for message in plan.messages}
    at = next(n for n, message in enumerate(plan.messages) if (message.giver, message.chunk) in took)
    relayed = plan.messages[at]
    early = took[relayed.giver, relayed.chunk]
    with pytest.raises(PlanError, match=r"a later one|at most one message"):
        _change_message(plan, at, round=early)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"format": "remesh.plan", "version": 99},
        {"format": "remesh.plan", "version": 1},
    ],
)
def test_json_that_is_no_plan_is_refused(value: object) -> None:
    with pytest.raises(PlanError, match="reading a plan"):
        Plan.from_json(value)


@given(st.data())
def test_json_with_any_field_replaced_is_refused_or_a_plan(data: st.DataObject) -> None:
    value = _base_plan().to_json()
    junk = st.one_of(st.none(), st.integers(-2, 99), st.text(max_size=3), st.lists(st.integers(-1, 9), max_size=4))
    key = data.draw(st.sampled_from([*value, "rows", "copies", "moves"]))
    target: object = value
    while isinstance(target, (list, dict)) and target:
        at = key if isinstance(target, dict) and key in target else None
        if at is None:
            at = data.draw(st.sampled_from(list(target) if isinstance(target, dict) else list(range(len(target)))))
        inner = target[at]  # type: ignore[index,call-overload]
        if not isinstance(inner, (list, dict)) or not inner or data.draw(st.booleans()):
            target[at] = data.draw(junk)  # type: ignore[index,call-overload]
            break
        target = inner
    try:
        Plan.from_json(value)
    except ValueError as error:  # PlanError and LayoutError are both
        assert type(error) is not ValueError


def test_clashing_moves_are_refused_by_name() -> None:
    box = Box((0,), (4,))
    plain = Layout((4,), (Shard(0, box),), "float32")
    with pytest.raises(PlanError, match=r"'w'.*\(4,\).*\(5,\)"):
        TensorMove("w", plain, Layout((5,), (), "float32"))
    with pytest.raises(PlanError, match=r"'w'.*float32.*int16"):
        TensorMove("w", plain, Layout((4,), (), "int16"))
    with pytest.raises(PlanError, match=r"'w'.*partial"):
        TensorMove("w", plain, Layout((4,), (Shard(0, box),), "float32", "sum"))
    with pytest.raises(PlanError, match=r"'w'.*'file:0'"):
        TensorMove("w", Layout((4,), (Shard("file:0", box),), "float32"), plain)
    move = TensorMove("w", plain, plain)
    with pytest.raises(PlanError, match="twice"):
        plan_reshard([move, move], {0: "a"})
    with pytest.raises(PlanError, match=r"rank 0 .*no host"):
        plan_reshard([move], {1: "a"})


def test_states_beyond_what_sums_of_sizes_can_hold_are_refused() -> None:
    shape = (1 << 59,)
    src, dst = (Layout(shape, (Shard(rank, Box.of_shape(shape)),), "float64") for rank in (0, 1))
    with pytest.raises(PlanError, match=r"4611686018427387904 bytes in total, expected fewer than 4611686018427387904"):
        plan_reshard([TensorMove("w", src, dst)], {0: "a", 1: "b"})
