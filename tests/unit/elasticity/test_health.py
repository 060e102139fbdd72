"""Who hangs, who is slow, and why this one."""

from __future__ import annotations

import sys
from types import FrameType

from hypothesis import given, strategies as st

from remesh.elasticity.health.health_machine import ANSWER_TIMEOUT_S, NODES_TIMEOUT_S, HealthMachine, HealthView
from remesh.elasticity.health.verdicts import RankStack, decide_culprits, find_stragglers, format_report
from remesh.elasticity.health.watch import find_collective, find_user_line, look_at_main_thread
from remesh.elasticity.membership.instructions import KillWorker, Note, Publish, Tell
from remesh.elasticity.model.generation import Generation
from remesh.elasticity.model.rank_assignment import MeshMember


def stack(rank: int, collective: str = "all_reduce", step: int = 5) -> RankStack:
    return RankStack(rank, rank // 2, rank % 2, step, collective, "train.py:7 in train", f"stack of rank {rank}")


def test_rank_that_sleeps_while_others_wait_is_the_culprit() -> None:
    verdict = decide_culprits([stack(0), stack(1, collective=""), stack(2), stack(3)])
    assert [one.rank for one in verdict.culprits] == [1]
    assert verdict.reason == (
        "each of ranks 0, 2, 3 waits in all_reduce after step 5, which did not enter: "
        "rank 1 is at train.py:7 in train after step 5"
    )


def test_rank_that_waits_a_step_behind_is_the_culprit() -> None:
    verdict = decide_culprits([stack(0), stack(1, step=4), stack(2)])
    assert [one.rank for one in verdict.culprits] == [1]
    assert "waits in all_reduce after step 4" in verdict.reason


def test_long_step_blames_nobody() -> None:
    assert decide_culprits([stack(rank, collective="") for rank in range(4)]).culprits == ()


def test_network_that_does_not_carry_blames_nobody() -> None:
    verdict = decide_culprits([stack(rank) for rank in range(4)])
    assert verdict.culprits == ()
    assert "network" in verdict.reason


def test_rank_that_does_not_answer_is_the_culprit() -> None:
    silent = RankStack(2, 1, 0, -1, "", "", "")
    for others in ([stack(0), stack(1)], [stack(0, ""), stack(1, "")]):
        verdict = decide_culprits([*others, silent])
        assert [one.rank for one in verdict.culprits] == [2]
        assert "does not answer" in verdict.reason


def test_report_has_every_stack_and_begins_with_the_culprits() -> None:
    stacks = [stack(0), stack(1, collective=""), stack(2)]
    report = format_report(decide_culprits(stacks), stacks)
    assert report.index("rank 1 (culprit)") < report.index("--- rank 0:")
    assert all(f"stack of rank {rank}" in report for rank in range(3))


@given(st.lists(st.tuples(st.booleans(), st.integers(3, 5)), min_size=1, max_size=6))
def test_culprits_never_wait_at_the_furthest_step_and_never_are_all(ranks: list[tuple[bool, int]]) -> None:
    stacks = [stack(rank, "all_reduce" if waits else "", step) for rank, (waits, step) in enumerate(ranks)]
    culprits = decide_culprits(stacks).culprits
    waiting = [step for waits, step in ranks if waits]
    expected = [r for r, (waits, step) in enumerate(ranks) if waiting and not (waits and step == max(waiting))]
    assert [one.rank for one in culprits] == expected
    assert len(culprits) < len(stacks)


def test_one_slow_rank_is_found_and_usual_noise_is_not() -> None:
    assert [one.rank for one in find_stragglers({0: 1.0, 1: 1.03, 2: 0.97, 3: 1.6})] == [3]
    assert find_stragglers({0: 1.0, 1: 1.1, 2: 0.9, 3: 1.15}) == []
    assert find_stragglers({0: 1.0, 1: 5.0}) == []
    assert find_stragglers({0: 0.0, 1: 0.0, 2: 1.0}) == []


@given(st.dictionaries(st.integers(0, 9), st.floats(0.5, 2.0), min_size=3), st.floats(0.1, 10))
def test_stragglers_do_not_depend_on_the_unit_of_time(busy: dict[int, float], unit: float) -> None:
    scaled = {rank: value * unit for rank, value in busy.items()}
    scores = {one.rank: one.score for one in find_stragglers(busy)}
    for one in find_stragglers(scaled):
        assert one.rank in scores or abs(one.score - 3.5) < 1e-6 or abs(one.ratio - 1.2) < 1e-6
    assert len(scores) <= len(busy) // 2


# --- the machine: two nodes with two workers each ---

MEMBERS = tuple(MeshMember(rank, rank // 2, rank % 2, 100 + rank) for rank in range(4))
PLAN = Generation(1, {"dp": 4}, MEMBERS, (), {0: "a", 1: "b"}, 0, True, "first")
QUIET = HealthView(None, {}, None)


def machine(index: int) -> HealthMachine:
    one = HealthMachine(index, hang_timeout_s=10.0)
    one.begin(PLAN, 0.0)
    return one


def test_job_that_makes_steps_is_never_asked() -> None:
    one = machine(0)
    for second in range(100):
        one.progressed(float(second))
        assert one.poll(QUIET, second + 9.0) == []


def test_node_without_a_step_says_so_once_and_asks_its_workers() -> None:
    one = machine(1)
    assert one.poll(QUIET, 11.0) == [Publish("gen/1/stuck", {"text": "no worker of b made a step for 11.0 s"})]
    assert one.poll(QUIET, 11.5) == []
    asked = one.poll(HealthView("stuck", {}, None), 12.0)
    assert asked == [Tell(slot, {"type": "stacks", "generation": 1}) for slot in (0, 1)]


def test_first_node_judges_and_the_culprits_node_kills_it() -> None:
    """Rank 3 sleeps; the others wait for it."""
    nodes = [machine(0), machine(1)]
    stuck = HealthView("stuck", {}, None)
    stacks = {}
    for index, one in enumerate(nodes):
        one.poll(stuck, 20.0)
        for slot in (0, 1):
            rank = 2 * index + slot
            one.answered(slot, stack(rank, "" if rank == 3 else "all_reduce"))
        (told,) = one.poll(stuck, 20.1)
        assert isinstance(told, Publish)
        stacks[index] = told.value["stacks"]
    assert nodes[1].poll(HealthView("stuck", stacks, None), 20.2) == []
    note, verdict = nodes[0].poll(HealthView("stuck", stacks, None), 20.2)
    assert isinstance(note, Note) and "rank 3 (culprit)" in note.values["report"]
    assert isinstance(verdict, Publish) and verdict.value["culprits"] == [[1, 1]]
    seen = HealthView("stuck", stacks, verdict.value)
    assert nodes[0].poll(seen, 20.3) == []
    (kill,) = nodes[1].poll(seen, 20.3)
    assert isinstance(kill, KillWorker) and kill.slot == 1
    assert nodes[1].poll(seen, 20.4) == []


def test_silence_of_workers_and_of_nodes_is_waited_for_in_bounds() -> None:
    """Slot 1 does not answer, and node b tells nothing at all."""
    one = machine(0)
    stuck = HealthView("stuck", {}, None)
    one.poll(stuck, 0.0)
    one.answered(0, stack(0))
    assert one.poll(stuck, ANSWER_TIMEOUT_S) == []
    (told,) = one.poll(stuck, ANSWER_TIMEOUT_S + 0.1)
    assert isinstance(told, Publish) and [s["step"] for s in told.value["stacks"]] == [5, -1]
    _, verdict = one.poll(HealthView("stuck", {0: told.value["stacks"]}, None), NODES_TIMEOUT_S + 0.1)
    assert isinstance(verdict, Publish) and verdict.value["culprits"] == [[0, 1], [1, 0], [1, 1]]


def test_new_generation_forgets_the_old_hang() -> None:
    one = machine(0)
    one.poll(HealthView("stuck", {}, None), 20.0)
    one.begin(Generation(2, {"dp": 4}, MEMBERS, (), {0: "a", 1: "b"}, 0, True, "again"), 21.0)
    assert one.poll(QUIET, 30.0) == []
    assert one.poll(QUIET, 31.5) != []


# --- looking at a stack ---


def frame_of(path: str, name: str) -> FrameType:
    """A frame of a function with this name, as if it stood in this file."""
    namespace = {"sys": sys}
    exec(compile(f"def {name}():\n    return sys._getframe()", path, "exec"), namespace)
    frame: FrameType = namespace[name]()  # type: ignore[operator]
    return frame


def test_collective_is_known_by_torchs_files() -> None:
    assert find_collective(frame_of("/x/torch/distributed/distributed_c10d.py", "all_reduce")) == "all_reduce"
    assert find_collective(frame_of("/x/train.py", "all_reduce")) == ""
    assert find_collective(None) == ""


def test_user_line_is_the_innermost_outside_libraries() -> None:
    assert find_user_line(frame_of("/x/train.py", "train")) == "train.py:2 in train"
    assert look_at_main_thread().collective == ""
    assert "test_user_line_is_the_innermost" in look_at_main_thread().text
