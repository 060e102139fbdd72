"""Checks of schedules: what is complete, and who waits for whom."""

from __future__ import annotations

import random

import pytest

from remesh.pipeline.costs import Costs, StageCost
from remesh.pipeline.edge_values import values_made, values_needed
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.peaks import compute_peaks
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.schedule_check import check_schedule, order_of_progress
from remesh.pipeline.schedules import eager_split, one_f_one_b
from tests.profiles import seeds
from tests.unit.pipeline.cases import U_SHAPE, parse_rows, random_schedule

CHAIN = StageGraph.chain(2)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (("0F0 0B0 0F1 0B1", "1F0 1B0"), "stage 1 does micro-batch 1 with 0 F, 0 B, 0 I, 0 W"),
        (("0F0 0B0 0F1 0B1 0F1", "1F0 1B0 1F1 1B1"), "stage 0 does micro-batch 1 with 2 F"),
        (("0F0 0I0 0F1 0B1", "1F0 1B0 1F1 1B1"), "micro-batch 0 with 1 F, 0 B, 1 I, 0 W"),
        (("0F0 0I0 0W0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"), "expected 1 F, and 1 B or 1 I and 1 W"),
        (("0F0 0W0 0I0 0F1 0B1", "1F0 1B0 1F1 1B1"), "0W0 needs 0I0"),
        (("0F0 0B0 0F1 0B1", "1B0 1F0 1F1 1B1"), "1B0 needs 1F0"),
    ],
)
def test_work_that_is_missing_double_or_out_of_order_is_named(rows: tuple[str, ...], match: str) -> None:
    with pytest.raises(PipelineError, match=match):
        check_schedule(Schedule("mine", 2, 2, parse_rows(*rows)), CHAIN)


def test_a_deadlock_tells_what_each_rank_waits_for() -> None:
    rows = parse_rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(PipelineError) as caught:
        check_schedule(Schedule("mine", 2, 2, rows), CHAIN)
    assert "rank 0 is at 0B0 and waits for the gradient of hidden of stage 1" in str(caught.value)
    assert "rank 1 is at 1F1 and waits for hidden of stage 0" in str(caught.value)


def test_graph_and_schedule_must_have_the_same_stages() -> None:
    with pytest.raises(PipelineError, match="has 2 stages, its stage graph 4"):
        check_schedule(one_f_one_b(2, 2), U_SHAPE)


@pytest.mark.parametrize("seed", seeds(20, quick=8))
def test_progress_makes_every_value_before_it_is_needed(seed: int) -> None:
    chance = random.Random(seed)
    schedule = random_schedule(chance, U_SHAPE, 5)
    made = set()
    order = list(order_of_progress(schedule, U_SHAPE))
    for action in order:
        assert made.issuperset(values_needed(U_SHAPE, action))
        made.update(values_made(U_SHAPE, action))
    for rank, row in enumerate(schedule.rows):
        assert [action for action in order if action.stage == rank] == list(row)


def test_a_delayed_micro_batch_keeps_only_what_its_weights_need() -> None:
    stage = StageCost(1, 1, 1, stash_bytes=100, delayed_bytes=10)
    costs = Costs.uniform(CHAIN, stage=stage)
    assert [peak.nbytes for peak in compute_peaks(eager_split(2, 8, 2), costs)] == [320, 120]
    assert [peak.num_live for peak in compute_peaks(eager_split(2, 8, 2), costs)] == [5, 3]
