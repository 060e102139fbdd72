"""The simulator: against a clock that ticks, and against the published and the simulated numbers."""

from __future__ import annotations

import random

import pytest

from remesh.pipeline.costs import Costs, EdgeCost, Lines, StageCost, read_costs
from remesh.pipeline.graph import Edge, StageGraph
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.schedules import (
    SCHEDULES,
    eager_one_f_one_b,
    eager_split,
    gpipe,
    one_f_one_b,
    one_f_one_b_split,
    zero_bubble_h1,
)
from remesh.pipeline.step_simulation import Transfers, compute_signal_bound_s, simulate_schedule
from tests.profiles import seeds
from tests.unit.pipeline.cases import U_SHAPE, parse_rows, random_costs, random_schedule, tick_through

# Signal bound over step time for transfer times of these parts of the forward time, F = I = W = 1.
RATIOS = (0.25, 0.5, 1, 1.5, 2)
FRACTIONS = {
    (2, 32): {
        "blocking": ".86 .76 .61 .51 .44",
        "1f1b": ".93 .86 .76 .67 .61",
        "1f1b-split": "1.01 1.00 .86 .76 .67",
        "eager-1f1b": ".99 .99 .98 .97 .88",
        "eager-split": "1.01 1.00 .99 .98 .97",
    },
    (4, 16): {
        "blocking": ".79 .65 .47 .37 .31",
        "1f1b": ".89 .80 .67 .58 .50",
        "1f1b-split": "1.03 1.00 .80 .67 .58",
        "eager-1f1b": ".97 .95 .90 .86 .76",
        "eager-split": "1.03 1.00 .95 .90 .86",
    },
    (8, 32): {
        "blocking": ".78 .64 .46 .36 .30",
        "1f1b": ".87 .77 .63 .53 .46",
        "1f1b-split": "1.03 1.00 .77 .63 .53",
        "eager-1f1b": ".97 .94 .89 .85 .74",
        "eager-split": "1.03 1.00 .94 .89 .85",
    },
}


@pytest.mark.parametrize(("num_stages", "num_microbatches"), FRACTIONS)
def test_fractions_of_the_signal_bound_are_those_of_an_independent_simulator(
    num_stages: int, num_microbatches: int
) -> None:
    graph = StageGraph.chain(num_stages)
    bound_s = compute_signal_bound_s(one_f_one_b(num_stages, num_microbatches), graph, Costs.uniform(graph))
    for name, expected in FRACTIONS[num_stages, num_microbatches].items():
        schedule = SCHEDULES["1f1b" if name == "blocking" else name](num_stages, num_microbatches)
        transfers = Transfers.BLOCKING if name == "blocking" else Transfers.ASYNC
        found = [
            bound_s
            / simulate_schedule(schedule, graph, Costs.uniform(graph, transfer_s=ratio), transfers=transfers).step_s
            for ratio in RATIOS
        ]
        assert " ".join(f"{each:.2f}".removeprefix("0") for each in found) == expected, name


@pytest.mark.parametrize("lines", list(Lines))
@pytest.mark.parametrize("graph", [StageGraph.chain(3), U_SHAPE], ids=["chain", "U"])
@pytest.mark.parametrize("seed", seeds(25, quick=8))
def test_times_are_those_of_a_clock_that_ticks(seed: int, graph: StageGraph, lines: Lines) -> None:
    chance = random.Random(seed)
    costs = random_costs(chance, graph, lines)
    schedule = random_schedule(chance, graph, chance.randint(1, 6))
    simulation = simulate_schedule(schedule, graph, costs)
    found = [[(timed.start_s, timed.end_s) for timed in row] for row in simulation.actions]
    assert found == tick_through(schedule, graph, costs)


def test_blocking_takes_longer_than_overlap() -> None:
    graph = StageGraph.chain(4)
    costs = Costs.uniform(graph, transfer_s=1)
    steps = [simulate_schedule(one_f_one_b(4, 16), graph, costs, transfers=transfers).step_s for transfers in Transfers]
    assert steps[0] < steps[1]


@pytest.mark.parametrize("lines", list(Lines))
def test_stages_on_one_rank_send_each_other_nothing(lines: Lines) -> None:
    rows = parse_rows("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")
    schedule, graph = Schedule("two each", 4, 2, rows), StageGraph(4, (*U_SHAPE.edges, Edge(1, 3, "near")))
    costs = random_costs(random.Random(1), graph, lines)
    simulation = simulate_schedule(schedule, graph, costs)
    found = [[(timed.start_s, timed.end_s) for timed in row] for row in simulation.actions]
    assert found == tick_through(schedule, graph, costs)
    assert {transfer.ranks for transfer in simulation.transfers} == {(0, 1), (1, 0)}


def test_the_signal_bound_of_1f1b_is_its_formula() -> None:
    for num_stages, num_microbatches in ((2, 32), (4, 16), (8, 32)):
        graph = StageGraph.chain(num_stages)
        bound_s = compute_signal_bound_s(one_f_one_b(num_stages, num_microbatches), graph, Costs.uniform(graph))
        assert bound_s == 3 * (num_microbatches + num_stages - 1)


def test_zero_bubble_fills_two_thirds_of_the_bubble_of_1f1b() -> None:
    graph = StageGraph.chain(4)
    costs = Costs.uniform(graph)
    step_s = simulate_schedule(zero_bubble_h1(4, 16), graph, costs).step_s
    assert (step_s, simulate_schedule(one_f_one_b(4, 16), graph, costs).step_s) == (51, 57)


def test_the_eager_warm_up_hides_forward_transfers_and_gpipe_all_but_fill_and_drain() -> None:
    graph = StageGraph.chain(2)
    costs = Costs.uniform(graph, transfer_s=1)
    steps = {
        build.__name__: simulate_schedule(build(2, 32), graph, costs).step_s
        for build in (one_f_one_b, one_f_one_b_split, eager_one_f_one_b, eager_split, gpipe)
    }
    assert steps["one_f_one_b"] > steps["one_f_one_b_split"] > steps["eager_one_f_one_b"] > steps["eager_split"]
    assert steps["gpipe"] == 3 * 32 + 3 + 2


def test_without_transfers_nobody_waits_for_communication() -> None:
    simulation = simulate_schedule(one_f_one_b(4, 8), StageGraph.chain(4), Costs.uniform(StageGraph.chain(4)))
    assert simulation.waited_s == (0, 0, 0, 0)
    assert simulation.busy_s == (24, 24, 24, 24)


@pytest.mark.parametrize("transfers", list(Transfers))
def test_what_a_rank_waits_for_communication_is_what_one_micro_batch_shows(transfers: Transfers) -> None:
    graph = StageGraph.chain(2)
    simulation = simulate_schedule(one_f_one_b(2, 1), graph, Costs.uniform(graph, transfer_s=0.25), transfers=transfers)
    assert simulation.step_s == 6.5
    assert simulation.waited_s == (0.25, 0.25)


def test_transfers_are_posted_started_ended_and_used_in_this_order() -> None:
    costs = random_costs(random.Random(3), U_SHAPE, Lines.NIC)
    simulation = simulate_schedule(eager_split(4, 8), U_SHAPE, costs)
    assert len(simulation.transfers) == 2 * 8 * len(U_SHAPE.edges)
    for transfer in simulation.transfers:
        assert transfer.post_s <= transfer.start_s <= transfer.end_s <= transfer.use_s


def test_a_schedule_that_cannot_run_is_not_simulated() -> None:
    rows = parse_rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(PipelineError, match="deadlock"):
        simulate_schedule(Schedule("mine", 2, 2, rows), StageGraph.chain(2), Costs.uniform(StageGraph.chain(2)))


def test_costs_must_fit_the_graph() -> None:
    with pytest.raises(PipelineError, match="costs of 4 stages and 5 edges, found 2 and 1"):
        simulate_schedule(one_f_one_b(4, 4), U_SHAPE, Costs.uniform(StageGraph.chain(2)))
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(PipelineError, match="finite"):
            StageCost(1.0, wrong, 1.0)
        with pytest.raises(PipelineError, match="finite"):
            EdgeCost(wrong, 0.0)


def test_costs_are_read_from_their_json_form() -> None:
    stage = {"forward_s": 1, "input_grad_s": 2, "weight_grad_s": 3, "stash_bytes": 4}
    edges = [
        {"source": 0, "target": 1, "nbytes": 100},
        {"source": 0, "target": 1, "name": "skip", "forward_s": 1, "backward_s": 2},
    ]
    form = {"stages": [stage, stage], "edges": edges, "rate_bytes_per_s": 50, "latency_s": 0.5, "lines": "nic"}
    graph, costs = read_costs(form)
    assert graph == StageGraph(2, (Edge(0, 1, "hidden"), Edge(0, 1, "skip")))
    assert costs.edges == (EdgeCost(2.5, 2.5), EdgeCost(1, 2))
    assert costs.stages[1] == StageCost(1, 2, 3, stash_bytes=4)
    assert costs.lines is Lines.NIC
    assert read_costs({"stages": [stage] * 3, "transfer_s": 0.5})[0] == StageGraph.chain(3)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"stages": [{"forward_s": 1}]},
        {"stages": 3},
        {"stages": [{"forward_s": 1, "input_grad_s": 1, "weight_grad_s": "x"}]},
        {"stages": [{"forward_s": 1, "input_grad_s": 1, "weight_grad_s": 1}], "lines": "wire"},
        {
            "stages": [{"forward_s": 1, "input_grad_s": 1, "weight_grad_s": 1}] * 2,
            "edges": [{"source": 0, "target": 1}],
        },
        {"stages": [], "edges": []},
    ],
)
def test_costs_that_cannot_be_read_are_refused(form: dict[str, object]) -> None:
    with pytest.raises(PipelineError):
        read_costs(form)
