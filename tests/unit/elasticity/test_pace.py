"""Who is slow for so long that something is done about it, and when a job is better off without it."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, strategies as st

from remesh.elasticity.health.straggler_pace import Pace, PaceJudge, median_without
from remesh.elasticity.membership.exclusion import Keep, LeaveOut, StragglerRules, decide_leave_out
from remesh.elasticity.model.generation import Generation
from remesh.elasticity.model.mesh_policy import make_template
from remesh.elasticity.model.rank_assignment import MeshMember

RULES = StragglerRules(factor=1.5, num_steps=20)


def paces(step: int, *busy_s: float) -> dict[int, Pace]:
    return {rank: Pace(one, step) for rank, one in enumerate(busy_s)}


@given(st.lists(st.floats(0, 100), min_size=2, max_size=9), st.data())
def test_median_of_the_others_is_that_of_a_plain_search(busy_s: list[float], data: st.DataObject) -> None:
    ordered = sorted(busy_s)
    at = data.draw(st.integers(0, len(ordered) - 1))
    assert median_without(ordered, at) == statistics.median(ordered[:at] + ordered[at + 1 :])


def test_rank_is_told_once_it_was_slow_for_all_the_steps() -> None:
    judge = PaceJudge(RULES)
    assert judge.compare(paces(5, 1.0, 1.0, 1.0, 2.0)) is None
    assert judge.compare(paces(24, 1.0, 1.0, 1.0, 2.0)) is None
    told = judge.compare(paces(25, 1.0, 1.1, 1.0, 2.0))
    assert told is not None and (told.rank, told.ratio) == (3, 2.0)
    assert told.reason == (
        "rank 3 works 2 s per step, 3 others 1 s (median), and so it was for 20 steps; allowed are 1.5 x for fewer "
        "than 20 steps"
    )
    assert judge.compare(paces(26, 1.0, 1.1, 1.0, 2.0)) is None, "one in a generation"


def test_a_rank_that_keeps_up_once_begins_anew() -> None:
    judge = PaceJudge(RULES)
    judge.compare(paces(5, 1.0, 1.0, 2.0))
    judge.compare(paces(15, 1.0, 1.0, 1.2))
    assert judge.compare(paces(25, 1.0, 1.0, 2.0)) is None
    judge.begin()
    assert judge.compare(paces(60, 1.0, 1.0, 2.0)) is None


def test_of_two_slow_ranks_the_slower_one_is_told() -> None:
    judge = PaceJudge(RULES)
    slow = (1.0, 1.0, 1.0, 1.0, 1.8, 1.0, 2.5)
    judge.compare(paces(0, *slow))
    told = judge.compare(paces(30, *slow))
    assert told is not None and told.rank == 6


@pytest.mark.parametrize("rules", [StragglerRules(), StragglerRules(num_steps=0)])
def test_nobody_is_told_unless_asked_nor_of_two_ranks(rules: StragglerRules) -> None:
    assert PaceJudge(rules).compare(paces(9, 1.0, 1.0, 90.0)) is None
    assert PaceJudge(StragglerRules(1.5, 0)).compare(paces(9, 1.0, 90.0)) is None


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=9), st.floats(1.01, 4))
def test_whoever_is_told_is_slower_than_half_of_the_others_by_the_factor(busy_s: list[float], factor: float) -> None:
    told = PaceJudge(StragglerRules(factor, 0)).compare(paces(0, *busy_s))
    slow = [
        rank for rank, one in enumerate(busy_s) if one >= factor * statistics.median(busy_s[:rank] + busy_s[rank + 1 :])
    ]
    assert (told is None) == (not slow)
    assert told is None or (told.rank in slow and told.ratio >= factor)


def plan_of(num_members: int, num_spares: int = 0, resting: tuple[tuple[int, int], ...] = ()) -> Generation:
    """One worker on each node; process ids are 100 and on."""
    workers = [
        MeshMember(rank if rank < num_members else -1, rank, 0, 100 + rank) for rank in range(num_members + num_spares)
    ]
    hosts = {rank: f"node-{rank}" for rank in range(len(workers))}
    members, standby = tuple(workers[:num_members]), tuple(workers[num_members:])
    return Generation(1, {"dp": num_members}, members, standby, hosts, 0, True, "", resting=resting)


def test_a_worker_is_left_out_if_it_is_slower_by_more_than_the_work_it_leaves_to_others() -> None:
    free, four = make_template({"dp": -1}), make_template({"dp": 4})
    cases = [
        (plan_of(4), free, 1.5, 1, LeaveOut),  # three others get a third more each
        (plan_of(4), free, 1.3, 1, Keep),
        (plan_of(4, 1), four, 1.3, 1, LeaveOut),  # a spare takes the seat: nobody has more to do
        (plan_of(4, 1, resting=((4, 104),)), four, 9.0, 1, Keep),  # that spare was slow itself
        (plan_of(4), four, 9.0, 1, Keep),  # there is no mesh of three
        (plan_of(4), free, 9.0, 4, Keep),  # four nodes are asked for
    ]
    for plan, template, ratio, min_nodes, expected in cases:
        verdict = decide_leave_out(plan, template, rank=2, ratio=ratio, min_nodes=min_nodes)
        assert isinstance(verdict, expected), verdict
        assert verdict.reason.startswith(f"worker 0 of node-2 (rank 2) works {ratio:.2f} x as long as the others")
