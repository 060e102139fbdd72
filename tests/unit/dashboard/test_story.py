"""A job's events, folded into a view: what is told twice counts once, what was taken back is gone, nothing breaks."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from remesh.dashboard.curve import Curve
from remesh.dashboard.story import RATE, Story, WorkerStory, coordinates_of
from remesh.dashboard.terminal import render


def line(kind: str, at_s: float = 0.0, who: str = "agent-0", **values: Any) -> dict[str, Any]:
    return {"t": at_s, "who": who, "kind": kind, **values}


def meeting_of(number: int, axes: dict[str, int], pids: list[int], **values: Any) -> dict[str, Any]:
    members = [{"rank": rank, "node": rank // 2, "slot": rank % 2, "pid": pid} for rank, pid in enumerate(pids)]
    told = {"step": 0, "reason": "they fit", "standby": [], "hosts": {"0": "node-a", "1": "node-b"}} | values
    return line("generation", number=number, axes=axes, members=members, **told)


def by_pid(story: Story) -> dict[int, WorkerStory]:
    """Its workers, where all have process ids of their own."""
    return {worker.pid: worker for worker in story.workers.values()}


def told(*events: dict[str, Any]) -> Story:
    story = Story()
    for event in events:
        story.take(event)
    return story


def test_members_stand_where_the_mesh_has_them() -> None:
    story = told(meeting_of(1, {"dp": 2, "tp": 2}, [10, 11, 12, 13]))
    assert story.state == "running"
    places = {pid: (worker.rank, worker.coordinates, worker.node) for pid, worker in by_pid(story).items()}
    assert places[10] == (0, {"dp": 0, "tp": 0}, "node-a")
    assert places[13] == (3, {"dp": 1, "tp": 1}, "node-b")
    assert {worker.state for worker in story.workers.values()} == {"filling"}


def test_a_worker_killed_stays_in_its_place_until_the_others_have_met() -> None:
    story = told(
        *(line("worker-started", slot=slot, pid=10 + slot) for slot in (0, 1)),
        meeting_of(1, {"dp": 2}, [10, 11]),
        line("worker-exited", slot=1, code=-9),
    )
    assert (by_pid(story)[11].state, by_pid(story)[11].rank) == ("gone", 1)
    story.take(meeting_of(2, {"dp": 1}, [10], step=7))
    assert (by_pid(story)[11].state, by_pid(story)[11].rank) == ("gone", None)
    assert (by_pid(story)[10].state, by_pid(story)[10].rank) == ("filling", 0)


def test_processes_of_one_number_on_two_nodes_are_two_workers() -> None:
    """In containers every node counts its processes from 1."""
    nodes = {"agent-0": "node-a", "agent-1": "node-b"}
    story = told(
        *(line("agent", who=who, node=node) for who, node in nodes.items()),
        *(line("worker-started", who=who, slot=slot, pid=7 + slot) for who in nodes for slot in (0, 1)),
        meeting_of(1, {"dp": 4}, [7, 8, 7, 8]),
        line("worker-exited", who="agent-1", slot=0, code=-9),
        line("left", who="worker-0-7"),
    )
    found = {(one.node, one.pid): (one.rank, one.state) for one in story.workers.values()}
    assert found == {
        ("node-a", 7): (0, "left"),
        ("node-a", 8): (1, "filling"),
        ("node-b", 7): (2, "gone"),
        ("node-b", 8): (3, "filling"),
    }


def test_spares_stand_by_and_those_who_did_not_come_are_gone() -> None:
    spare = [{"rank": -1, "node": 1, "slot": 1, "pid": 13}]
    story = told(meeting_of(1, {"dp": 4}, [10, 11, 12, 13]), meeting_of(2, {"dp": 2}, [10, 11], standby=spare))
    assert {pid: worker.state for pid, worker in by_pid(story).items()} == {
        10: "filling",
        11: "filling",
        12: "gone",
        13: "standby",
    }


def test_who_is_left_out_for_being_slow_stands_by_and_every_reason_is_listed() -> None:
    slow = [{"rank": -1, "node": 1, "slot": 1, "pid": 13}]
    story = told(
        meeting_of(1, {"dp": 4}, [10, 11, 12, 13]),
        line("straggler-kept", reason="too few nodes would be left"),
        line("pause", generation=1, reason="worker 1 of b is slow"),
        line("excluded", reason="it stands by for 30 s", seconds=30),
        meeting_of(2, {"dp": 3}, [10, 11, 12], standby=slow, reason="worker 1 of b was slow"),
    )
    assert (by_pid(story)[13].state, by_pid(story)[13].rank) == ("standby", None)
    texts = [happening.text for happening in story.happenings]
    assert texts[1:4] == ["too few nodes would be left", "worker 1 of b is slow", "it stands by for 30 s"]
    assert "worker 1 of b was slow" in texts[4]


def test_what_several_processes_tell_counts_once() -> None:
    again = meeting_of(1, {"dp": 2}, [10, 11])
    filled = [
        line("filled", generation=1, rank=rank, source="peers", reason="a holder lives", seconds=0.1 * (rank + 1))
        | {"bytes_by_giver": [[1 - rank, 64 + rank]], "bytes_taken": 100, "bytes_from_disk": 5}
        for rank in (0, 1)
    ]
    story = told(again, again, *filled, *(line("saved", step=3, path="a/3", seconds=s) for s in (1.0, 2.0)))
    assert len(story.generations) == len(story.moves) == len(story.checkpoints) == 1
    assert (story.moves[0].seconds, story.moves[0].bytes_from_disk) == (0.2, 10)
    assert story.moves[0].bytes_by_pair == [[0, 1, 65], [1, 0, 64]]
    assert story.moves[0].bytes_moved == 200
    assert story.checkpoints[0].seconds == 2.0


def test_a_job_started_again_with_the_same_folder_is_told_from_its_beginning() -> None:
    """As platforms do: the events of both runs stand in one folder."""
    first = [
        line("meeting", generation=1),
        meeting_of(1, {"dp": 2}, [10, 11]),
        line("finish", ok=False, text="a host died"),
    ]
    story = told(*first, *(line("step", 1.0 + step, "worker-10", step=step, rank=0, loss=1.0) for step in (1, 2, 3)))
    assert (story.state, story.told) == ("failed", "a host died")
    for event in (
        line("meeting", 10.0, generation=1),
        meeting_of(1, {"dp": 1}, [20], step=2, reason="started again"),
        meeting_of(1, {"dp": 1}, [20], step=2, reason="told by another agent"),
        line("meeting", 10.0, "agent-1", generation=1),
    ):
        story.take(event)
    assert (story.state, story.told, story.step) == ("running", "", 2)
    assert list(by_pid(story)) == [20]
    assert [each.reason for each in story.generations] == ["they fit", "started again"]
    assert [step for step, *_ in story.curves["loss"].points()] == [1, 2], "steps that are taken again are taken back"
    story.take(line("finish", 20.0, ok=True, text="all workers ended well"))
    assert story.state == "ended"


def test_a_job_in_restart_mode_is_told_by_its_rounds() -> None:
    failure = {"rank": 1, "local_rank": 1, "node": "vm", "pid": 11, "exit_code": 5, "message": "no disk"}
    rounds = [line("round", number=number, world_size=2, num_nodes=1, restarts_left=2 - number) for number in (1, 2)]
    starts = [[line("worker-started", slot=slot, rank=slot, pid=base + slot) for slot in (0, 1)] for base in (10, 20)]
    story = told(line("agent", node="vm"), rounds[0], *starts[0])
    places = {pid: (one.rank, one.node, one.state) for pid, one in by_pid(story).items()}
    assert places == {10: (0, "vm", "training"), 11: (1, "vm", "training")}
    story.take(line("worker-failed", **failure))
    assert by_pid(story)[11].state == "gone"
    assert story.happenings[-1].text == "rank 1 (worker 1 of vm, pid 11) failed, exit code 5: no disk"
    for event in (line("worker-exited", slot=0, rank=0, pid=10), line("restart", reason="workers failed"), rounds[1]):
        story.take(event)
    for event in starts[1]:
        story.take(event)
    assert [pid for pid, one in by_pid(story).items() if one.rank is not None] == [20, 21]
    for event in (line("worker-exited", slot=0, rank=0, pid=20), line("finish", ok=False, text="ended by SIGTERM")):
        story.take(event)
    assert (story.state, story.num_unreadable) == ("failed", 0)
    assert [by_pid(story)[pid].state for pid in (20, 21)] == ["done", "gone"]
    assert [each.reason for each in story.generations][-1] == "2 workers on 1 node, restarts left: 0"
    story.take(rounds[0])
    assert (story.state, story.told) == ("running", ""), "it was started again with the same folder"


def test_curves_average_over_ranks_and_forget_what_was_taken_back() -> None:
    steps = [
        line("step", at_s=step, generation=1, rank=rank, step=step, loss=float(step + rank), note="x", ok=True)
        for step in (1, 2, 3)
        for rank in (0, 1)
    ]
    story = told(meeting_of(1, {"dp": 2}, [10, 11]), *steps)
    assert story.curves.keys() == {"loss", RATE}
    assert story.curves["loss"].points() == [[1, 1.5], [2, 2.5], [3, 3.5]]
    assert story.curves[RATE].points() == [[2, 1.0], [3, 1.0]]
    assert by_pid(story)[11].step == 3
    story.take(meeting_of(2, {"dp": 2}, [10, 11], step=1))
    assert story.step == 1
    assert story.curves["loss"].points() == [[1, 1.5]]
    story.take(line("step", generation=1, rank=0, step=9, loss=9.0))
    assert story.step == 1, "a straggler of a mesh that is no more"


def test_what_a_program_logs_with_every_step_does_not_flood_the_list() -> None:
    story = told(*(line("batch", step=n, samples=[n]) for n in range(100)), line("note", text="hello"))
    assert [each.kind for each in story.happenings].count("batch") == 5
    assert story.happenings[-1].text == "hello"


def test_the_end_is_told_once_with_its_reason() -> None:
    story = told(line("finish", ok=False, text="the script raised"), line("finish", ok=True, text="fine"))
    assert (story.state, story.told) == ("failed", "the script raised")


KINDS = (
    *("agent", "worker", "worker-started", "worker-exited", "meeting", "generation", "grown", "filled", "step"),
    *("saved", "left", "broken", "pause", "finish", "anything"),
)
FIELDS = ("pid", "slot", "node", "generation", "number", "axes", "members", "rank", "step", "bytes_by_giver", "code")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
wild = st.builds(
    lambda kind, fields: {"t": 1.0, "who": "x", "kind": kind, **fields},
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=8),
)


def test_a_move_among_many_ranks_keeps_its_total_and_the_largest_pairs() -> None:
    about = {"source": "peers", "reason": "a holder lives", "seconds": 0.1, "bytes_from_disk": 0}
    givers = [[giver, 1000 - giver] for giver in range(16)]
    filled = [
        line("filled", generation=1, rank=rank, bytes_by_giver=givers, bytes_taken=20_000 + rank, **about)
        for rank in range(100)
    ]
    (move,) = told(meeting_of(1, {"dp": 100}, list(range(100))), *filled).moves
    assert move.bytes_moved == sum(20_000 + rank for rank in range(100))
    assert [nbytes for *_, nbytes in move.bytes_by_pair] == [1000] * 100 + [999] * 100 + [998] * 56


@given(st.lists(wild, max_size=12))
def test_no_event_of_any_form_breaks_the_view(events: list[dict[str, Any]]) -> None:
    story = told(meeting_of(1, {"dp": 2}, [10, 11]), *events)
    json.dumps(story.to_json())
    Console(file=None, quiet=True).print(render(story, "job"))


def test_events_of_the_wrong_form_are_counted() -> None:
    story = told(line("generation", number="x"), line("step"), line("filled", generation=1))
    assert story.num_unreadable == 3
    assert story.to_json()["num_unreadable"] == 3


@given(st.lists(st.tuples(st.integers(0, 400), st.floats(-100, 100)), max_size=300), st.integers(2, 16))
def test_a_curve_keeps_exact_averages_in_few_points(samples: list[tuple[int, float]], limit: int) -> None:
    curve = Curve(limit)
    for step, value in samples:
        curve.add(step, value)
    points = curve.points()
    assert len(points) <= limit
    starts = [int(start) for start, _ in points]
    for at, (start, average) in enumerate(points):
        end = starts[at + 1] if at + 1 < len(starts) else math.inf
        inside = [value for step, value in samples if start <= step < end]
        assert average == pytest.approx(sum(inside) / len(inside), abs=1e-9)


def test_a_value_that_is_no_number_leaves_a_gap() -> None:
    curve = Curve()
    curve.add(1, math.nan)
    curve.add(2, math.inf)
    curve.add(3, 1.0)
    assert curve.points() == [[3, 1.0]]


def test_a_loss_that_is_no_number_is_told_once_and_until_a_number_comes_again() -> None:
    story = told(
        line("step", step=1, loss=2.0), line("step", step=2, loss=math.nan), line("step", step=3, loss=math.nan)
    )
    assert story.no_numbers == {"loss": 2}
    assert [each.text for each in story.happenings] == ["loss is nan, not a number, at step 2"]
    story.take(line("step", step=4, loss=1.0))
    assert story.no_numbers == {}


def test_coordinates_count_the_last_axis_first() -> None:
    axes = {"pp": 2, "dp": 3, "tp": 2}
    seen = [coordinates_of(rank, axes) for rank in range(12)]
    assert [tuple(each.values()) for each in seen] == [(p, d, t) for p in range(2) for d in range(3) for t in range(2)]
