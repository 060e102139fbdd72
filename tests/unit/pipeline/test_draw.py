"""Pictures of a step: every action and every transfer is in them, once and in its place."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from remesh.pipeline.costs import Costs, StageCost
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.schedules import eager_split, one_f_one_b
from remesh.pipeline.step_pictures import draw_svg, draw_text
from remesh.pipeline.step_simulation import Simulation, Transfers, simulate_schedule
from tests.unit.pipeline.cases import U_SHAPE

_SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def step() -> Simulation:
    return simulate_schedule(eager_split(4, 6), U_SHAPE, Costs.uniform(U_SHAPE, transfer_s=0.5))


def test_the_text_clock_has_a_line_for_each_rank_and_every_action_in_it(step: Simulation) -> None:
    lines = draw_text(step, width=200).splitlines()
    assert len(lines) == 5
    for rank, row in enumerate(step.actions):
        assert lines[rank].startswith(f"rank {rank} |")
        for timed in row:
            assert f"{timed.action.kind}{timed.action.microbatch}" in lines[rank]
    assert f"0 .. {step.step_s:g}" in lines[-1]


def test_idle_columns_are_the_idle_share() -> None:
    graph = StageGraph.chain(2)
    simulation = simulate_schedule(one_f_one_b(2, 4), graph, Costs.uniform(graph))
    for line, busy_s in zip(draw_text(simulation, width=150).splitlines(), simulation.busy_s, strict=False):
        assert line.count(".") == 10 * (simulation.step_s - busy_s)


def test_the_svg_has_a_box_for_each_action_and_a_bar_for_each_transfer(step: Simulation) -> None:
    root = ElementTree.fromstring(draw_svg(step, title="<U>", bound_s=20))
    tips = [title.text or "" for title in root.iter(f"{_SVG}title")]
    assert sum(" to rank " in tip for tip in tips) == len(step.transfers)
    assert sum(": " in tip for tip in tips) == sum(map(len, step.actions))
    assert "no schedule beats 20" in tips
    assert "<U>" in [text.text for text in root.iter(f"{_SVG}text")]


def test_blocking_transfers_are_gaps_and_not_bars() -> None:
    graph = StageGraph.chain(2)
    costs = Costs.uniform(graph, transfer_s=1)
    simulation = simulate_schedule(one_f_one_b(2, 4), graph, costs, transfers=Transfers.BLOCKING)
    assert "sent" not in draw_svg(simulation)


def test_boxes_lie_inside_the_picture_and_follow_time(step: Simulation) -> None:
    root = ElementTree.fromstring(draw_svg(step, width_px=500))
    boxes = [rect for rect in root.iter(f"{_SVG}rect") if rect.find(f"{_SVG}title") is not None]
    assert all(float(box.get("x", "")) + float(box.get("width", "")) <= 500 for box in boxes)
    first_row = [box for box in boxes if box.get("y") == boxes[0].get("y")]
    places = [float(box.get("x", "")) for box in first_row]
    assert places == sorted(places)
    assert len(places) == len(step.actions[0])


def test_a_step_without_any_time_is_drawn() -> None:
    graph = StageGraph.chain(1)
    simulation = simulate_schedule(one_f_one_b(1, 1), graph, Costs.uniform(graph, stage=StageCost(0, 0, 0)))
    assert draw_text(simulation, width=10).splitlines()[0] == "rank 0 |..........|"
    ElementTree.fromstring(draw_svg(simulation))
