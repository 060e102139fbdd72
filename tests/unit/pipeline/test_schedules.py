"""Actions, stage graphs and schedules as values: what they mean, and what they refuse."""

from __future__ import annotations

import pytest

from remesh.foundation.errors import ConfigError
from remesh.pipeline.actions import Action, ActionKind
from remesh.pipeline.graph import Edge, StageGraph, Tie
from remesh.pipeline.peaks import compute_peaks
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.schedule_check import check_schedule
from remesh.pipeline.schedules import SCHEDULES, build_schedule, eager_split, eager_warmups, one_f_one_b_split
from tests.unit.pipeline.cases import U_SHAPE, parse_rows


@pytest.mark.parametrize("kind", list(ActionKind))
def test_an_action_reads_back_from_its_string(kind: ActionKind) -> None:
    action = Action(12, kind, 305)
    assert Action.parse(f" {action} ") == action


@pytest.mark.parametrize(
    "text", ["", "F0", "0X1", "0F", "0SEND_F1", "0F-1", "0F1 ", "0F1x", "٣F1", "0F1;0B1", "0" * 9 + "F1"]
)
def test_what_is_no_action_is_refused_by_name(text: str) -> None:
    if text == "0F1 ":
        assert Action.parse(text) == Action(0, ActionKind.F, 1)
        return
    with pytest.raises(PipelineError):
        Action.parse(text)


def test_errors_of_the_room_are_errors_of_the_request() -> None:
    assert issubclass(PipelineError, ConfigError)


def test_a_circle_of_stages_is_named() -> None:
    edges = (Edge(0, 1, "h"), Edge(1, 2, "h"), Edge(2, 1, "back"), Edge(2, 3, "h"))
    with pytest.raises(PipelineError, match=r"cycle, (1 -> 2 -> 1|2 -> 1 -> 2)"):
        StageGraph(4, edges)


@pytest.mark.parametrize(
    ("num_stages", "edges", "match"),
    [
        (0, (), "at least 1 stage"),
        (2, (Edge(0, 2, "h"),), "stages 0 to 1"),
        (2, (Edge(0, 1, "h"), Edge(0, 1, "h")), "appears twice"),
        (3, (Edge(0, 2, "h"), Edge(2, 1, "h")), "goes to a stage with a smaller number"),
        (3, (Edge(0, 2, "h"),), "stage 1 gives no value"),
        (2, (Edge(0, 0, "h"), Edge(0, 1, "h")), "cycle"),
    ],
)
def test_a_stage_graph_that_cannot_be_is_refused(num_stages: int, edges: tuple[Edge, ...], match: str) -> None:
    with pytest.raises(PipelineError, match=match):
        StageGraph(num_stages, edges)


@pytest.mark.parametrize("parameters", [((0, "a"),), ((0, "a"), (2, "b")), ((0, "a"), (1, "b"), (1, "c"))])
def test_a_tie_of_no_two_stages_is_refused(parameters: tuple[tuple[int, str], ...]) -> None:
    with pytest.raises(PipelineError, match="the tied weight a of stage 0"):
        StageGraph(2, (Edge(0, 1, "h"),), (Tie(parameters),))


def test_a_schedule_of_no_micro_batches_is_refused() -> None:
    with pytest.raises(PipelineError, match="expected at least 1 micro-batch, found 0"):
        eager_split(2, 0)


def test_two_stages_may_have_several_edges_between_them() -> None:
    assert [edge.name for edge in U_SHAPE.edges_into(2)] == ["h", "skip"]
    assert [edge.target for edge in U_SHAPE.edges_out_of(0)] == [1, 3]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("graph", [StageGraph.chain(1), StageGraph.chain(4), U_SHAPE], ids=["1", "4", "U"])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_every_schedule_does_all_work_and_comes_to_its_end(name: str, graph: StageGraph, num_microbatches: int) -> None:
    check_schedule(SCHEDULES[name](graph.num_stages, num_microbatches), graph)


def test_the_warm_up_of_eager_is_that_of_the_paper_whose_stages_count_from_one() -> None:
    num_stages = 5
    of_paper = [2 * (num_stages - i) + 1 for i in range(1, num_stages + 1)]
    assert eager_warmups(num_stages, 100) == of_paper == [9, 7, 5, 3, 1]


def test_rows_are_those_of_the_papers() -> None:
    def rows(name: str) -> list[str]:
        return [" ".join(str(a)[1:] for a in row) for row in SCHEDULES[name](4, 5).rows]

    assert rows("1f1b")[0] == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert rows("1f1b")[3] == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
    assert rows("eager-1f1b")[2] == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert rows("gpipe")[3] == "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"
    assert rows("1f1b-split")[3] == "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 F4 I4 W4"
    # The last stage of ZB-H1 in figure 3 of arXiv 2401.10241, counted from 0.
    assert rows("zb-h1")[3] == "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4"


def test_a_stage_keeps_its_warm_up_and_its_delay() -> None:
    for schedule, delay in ((eager_split(4, 32), 0), (eager_split(4, 32, 2), 2), (one_f_one_b_split(4, 32, 1), 1)):
        warmups = [sum(1 for _ in _until_backward(row)) for row in schedule.rows]
        assert [peak.num_live for peak in compute_peaks(schedule)] == [warmup + delay for warmup in warmups]


def _until_backward(row: tuple[Action, ...]) -> list[Action]:
    first = next(n for n, action in enumerate(row) if action.kind is not ActionKind.F)
    return list(row[:first])


def test_delays_may_differ_from_stage_to_stage_and_be_absent() -> None:
    schedule = build_schedule("mixed", 4, [2, 1], [None, 1])
    kinds = [{action.kind.value for action in row} for row in schedule.rows]
    assert kinds == [{"F", "B"}, {"F", "I", "W"}]


def test_fewer_micro_batches_than_the_warm_up_needs_are_refused() -> None:
    with pytest.raises(PipelineError, match="3 forwards before its first backward, expected 1 to 2"):
        build_schedule("mine", 2, [3, 1])


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (("0F0 0F2", ""), "outside its 2 stages and 2"),
        (("0F0", "2F0"), "outside its 2 stages"),
        (("0F0", "0B0"), "lives on one rank"),
    ],
)
def test_a_table_that_cannot_be_is_refused(rows: tuple[str, ...], match: str) -> None:
    with pytest.raises(PipelineError, match=match):
        Schedule("mine", 2, 2, parse_rows(*rows))


def test_a_rank_may_have_several_stages() -> None:
    rows = parse_rows("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0")
    schedule = Schedule("interleaved", 4, 1, rows)
    check_schedule(schedule, StageGraph.chain(4))
    assert schedule.row_of == {0: 0, 1: 1, 2: 0, 3: 1}
