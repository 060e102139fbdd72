"""The search: against all schedules of small pipelines, against the known schedules, and against the bound."""

from __future__ import annotations

import itertools
import random
from operator import le

import pytest

from remesh.pipeline.costs import Costs, Lines, StageCost
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.peaks import compute_peaks
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.schedule_check import check_schedule
from remesh.pipeline.schedules import SCHEDULES, build_schedule, eager_split, one_f_one_b, zero_bubble_h1
from remesh.pipeline.search import search_schedule
from remesh.pipeline.step_bound import compute_bound
from remesh.pipeline.step_simulation import compute_signal_bound_s, simulate_schedule
from tests.profiles import seeds, so_many
from tests.unit.pipeline.cases import U_SHAPE, random_costs, random_schedule

TOLERANCE = 0.01


def _all_of_two_stages(graph: StageGraph, costs: Costs, num: int) -> list[tuple[float, int]]:
    """Time, and bytes of the fullest rank, of every warm-up and every delay up to 4: the dumb search."""
    found = []
    knobs = list(itertools.product(range(1, num + 1), (None, 0, 1, 2, 3, 4)))
    for (first, delay), (second, other) in itertools.product(knobs, repeat=2):
        if first >= second:
            schedule = build_schedule("any", num, [first, second], [delay, other])
            step_s = simulate_schedule(schedule, graph, costs).step_s
            found.append((step_s, max(peak.nbytes for peak in compute_peaks(schedule, costs))))
    return found


@pytest.mark.parametrize("lines", list(Lines))
@pytest.mark.parametrize("seed", seeds(4, quick=2))
def test_on_two_stages_nothing_is_faster_or_as_fast_with_less(seed: int, lines: Lines) -> None:
    graph = StageGraph.chain(2)
    costs = random_costs(random.Random(seed), graph, lines)
    found = search_schedule(graph, costs, 5, tolerance=TOLERANCE)
    every = _all_of_two_stages(graph, costs, 5)
    assert found.fastest_s <= min(step_s for step_s, _ in every)
    least = min(kept for step_s, kept in every if step_s <= found.fastest_s * (1 + TOLERANCE))
    assert max(peak.nbytes for peak in found.peaks) <= least


@pytest.mark.parametrize("transfer_s", [0, 0.5, 2, 0.25, 1, 1.5][: so_many(6, quick=3)])
@pytest.mark.parametrize(("num_stages", "num"), [(2, 32), (4, 16), (8, 32)])
def test_no_known_schedule_is_faster_or_as_fast_with_less(num_stages: int, num: int, transfer_s: float) -> None:
    graph = StageGraph.chain(num_stages)
    costs = Costs.uniform(graph, transfer_s=transfer_s)
    found = search_schedule(graph, costs, num, tolerance=TOLERANCE)
    assert found.step_s <= found.fastest_s * (1 + TOLERANCE)
    assert found.bound.step_s <= found.fastest_s <= 1.01 * found.bound.step_s
    for build in SCHEDULES.values():
        schedule = build(num_stages, num)
        step_s = simulate_schedule(schedule, graph, costs).step_s
        assert found.fastest_s <= step_s
        if step_s <= found.fastest_s * (1 + TOLERANCE):
            kept = max(peak.nbytes for peak in compute_peaks(schedule, costs))
            assert max(peak.nbytes for peak in found.peaks) <= kept


@pytest.mark.parametrize("seed", seeds(10, quick=4))
def test_what_is_found_runs_as_it_says_and_meets_its_limits(seed: int) -> None:
    chance = random.Random(seed)
    costs = random_costs(chance, U_SHAPE, chance.choice(list(Lines)))
    limits = [cost.stash_bytes * chance.randint(1, 4) for cost in costs.stages]
    found = search_schedule(U_SHAPE, costs, 8, limits_bytes=limits)
    check_schedule(found.schedule, U_SHAPE)
    assert all(map(le, (peak.nbytes for peak in compute_peaks(found.schedule, costs)), limits))
    assert found.step_s == simulate_schedule(found.schedule, U_SHAPE, costs).step_s
    assert found.signal_s == compute_signal_bound_s(found.schedule, U_SHAPE, costs)
    assert found.peaks == compute_peaks(found.schedule, costs)
    assert found.fastest_s <= found.step_s <= found.fastest_s * (1 + TOLERANCE)


def test_the_same_question_has_the_same_answer() -> None:
    costs = random_costs(random.Random(5), U_SHAPE, Lines.NIC)
    assert search_schedule(U_SHAPE, costs, 4) == search_schedule(U_SHAPE, costs, 4)


def test_less_memory_takes_more_time_and_never_less() -> None:
    graph = StageGraph.chain(4)
    costs = Costs.uniform(graph, transfer_s=1)
    steps = [search_schedule(graph, costs, 16, limits_bytes=limit, tolerance=0).step_s for limit in (2, 3, 4, 5, 7, 16)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


def test_a_limit_that_no_schedule_meets_is_refused_before_anything_is_tried() -> None:
    graph = StageGraph.chain(2)
    costs = Costs.uniform(graph, stage=StageCost(1, 1, 1, stash_bytes=100))
    with pytest.raises(PipelineError, match="rank 1 keeps 100 bytes for a single micro-batch, its limit is 99 bytes"):
        search_schedule(graph, costs, 4, limits_bytes=[None, 99])
    assert search_schedule(graph, costs, 4, limits_bytes=100).peaks[0].num_live == 1


def test_more_effort_is_never_slower_and_can_be_faster() -> None:
    costs = random_costs(random.Random(7), U_SHAPE, Lines.NIC)
    found = [search_schedule(U_SHAPE, costs, so_many(16, quick=10), effort=effort) for effort in (1, 2)]
    assert found[1].fastest_s <= found[0].fastest_s
    assert found[1].num_tried > found[0].num_tried


@pytest.mark.parametrize("graph", [StageGraph.chain(4), U_SHAPE], ids=["chain", "U"])
@pytest.mark.parametrize("limits", [[1, 9, 9, 9], [9, 1, 9, 9], [9, 9, 1, 9], [2, 9, 1, 9]])
def test_one_rank_with_little_memory_is_no_deadlock_for_the_others(graph: StageGraph, limits: list[int]) -> None:
    costs = Costs.uniform(graph, transfer_s=1)
    found = search_schedule(graph, costs, 8, limits_bytes=limits)
    check_schedule(found.schedule, graph)
    assert all(map(le, (peak.nbytes for peak in compute_peaks(found.schedule, costs)), limits))


def test_compute_and_transfers_may_take_no_time() -> None:
    for graph in (StageGraph.chain(1), StageGraph.chain(3)):
        costs = Costs.uniform(graph, stage=StageCost(0, 0, 0))
        for num in (1, 5):
            assert search_schedule(graph, costs, num).step_s == 0


@pytest.mark.parametrize(
    ("num", "more"),
    [
        (0, {}),
        (4, {"effort": 0}),
        (4, {"tolerance": -1.0}),
        (4, {"tolerance": float("nan")}),
        (4, {"limits_bytes": [1]}),
    ],
)
def test_a_question_that_cannot_be_is_refused(num: int, more: dict[str, object]) -> None:
    graph = StageGraph.chain(2)
    with pytest.raises(PipelineError, match="searching a schedule"):
        search_schedule(graph, Costs.uniform(graph), num, **more)  # type: ignore[arg-type]


def test_the_reason_has_both_times_and_both_memories() -> None:
    graph = StageGraph.chain(2)
    found = search_schedule(graph, Costs.uniform(graph, transfer_s=1), 32)
    assert f"takes {found.step_s:g} and keeps {max(p.nbytes for p in found.peaks)}" in found.reason
    assert f"{found.fastest_s:g}" in found.reason
    assert found.bound.reason in found.reason


def test_without_transfers_it_leaves_no_more_bubble_than_zero_bubble_at_equal_memory() -> None:
    for num_stages, num in ((2, 32), (4, 16), (8, 32)):
        graph = StageGraph.chain(num_stages)
        costs = Costs.uniform(graph)
        limit = max(peak.nbytes for peak in compute_peaks(zero_bubble_h1(num_stages, num), costs))
        found = search_schedule(graph, costs, num, limits_bytes=limit, tolerance=0)
        assert found.step_s <= simulate_schedule(zero_bubble_h1(num_stages, num), graph, costs).step_s


@pytest.mark.parametrize("lines", list(Lines))
@pytest.mark.parametrize("graph", [StageGraph.chain(1), StageGraph.chain(3), U_SHAPE], ids=["1", "chain", "U"])
@pytest.mark.parametrize("seed", seeds(15, quick=5))
def test_no_schedule_beats_the_bound(seed: int, graph: StageGraph, lines: Lines) -> None:
    chance = random.Random(seed)
    costs = random_costs(chance, graph, lines)
    num = chance.randint(1, 8)
    schedules = [random_schedule(chance, graph, num) for _ in range(5)]
    schedules.append(eager_split(graph.num_stages, num))
    bound = compute_bound(graph, costs, num)
    assert all(simulate_schedule(each, graph, costs).step_s >= bound.step_s for each in schedules)


def test_the_bound_of_one_micro_batch_is_its_round_trip() -> None:
    costs = random_costs(random.Random(2), U_SHAPE, Lines.HOP)
    assert compute_bound(U_SHAPE, costs, 1).step_s <= simulate_schedule(eager_split(4, 1), U_SHAPE, costs).step_s
    chain = StageGraph.chain(3)
    costs = random_costs(random.Random(2), chain, Lines.HOP)
    step_s = simulate_schedule(one_f_one_b(3, 1), chain, costs).step_s
    split_s = simulate_schedule(eager_split(3, 1), chain, costs).step_s
    assert compute_bound(chain, costs, 1).step_s == split_s <= step_s


def test_the_bound_names_what_makes_it() -> None:
    graph = StageGraph.chain(2)
    assert compute_bound(graph, Costs.uniform(graph, transfer_s=0.5), 32).reason == "all work of stage 1"
    assert compute_bound(graph, Costs.uniform(graph, transfer_s=5), 32).reason.startswith("transfers from stage")
