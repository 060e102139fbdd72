"""What stages queue over NCCL comes to its end, whatever is fast and slow; other orders of the same do not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from remesh.pipeline.actions import Action
from remesh.pipeline.edge_values import Pass, Value, values_made, values_needed
from remesh.pipeline.graph import Edge, StageGraph
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.queues import Crossing, Queue, crossings_of, plan_queues
from remesh.pipeline.running.runtime import check_device
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.schedules import SCHEDULES
from tests.profiles import seeds
from tests.unit.pipeline.cases import U_SHAPE, parse_rows, random_schedule

SKIPPING = StageGraph(3, (Edge(0, 1, "h"), Edge(1, 2, "h"), Edge(0, 2, "skip"), Edge(0, 2, "other")))
GRAPHS = (StageGraph.chain(1), StageGraph.chain(2), StageGraph.chain(4), SKIPPING, U_SHAPE)
State = tuple[tuple[int, ...], tuple[int, ...]]
"""How far every stage has come with its actions, and how far with its crossings."""


def values_of(crossing: Crossing, graph: StageGraph) -> tuple[Value, ...]:
    """What crosses."""
    is_forward = crossing.way is Pass.FORWARD
    ends = (crossing.giver, crossing.taker) if is_forward else (crossing.taker, crossing.giver)
    return tuple(
        Value(number, crossing.way, crossing.microbatch)
        for number, edge in enumerate(graph.edges)
        if (edge.source, edge.target) == ends
    )


def where_stuck(queues: tuple[Queue, ...], graph: StageGraph) -> list[Action | Crossing]:
    """Where rows do not come to the end of their queues, which are played through.

    So strictly: ranks do one thing at a time, and block in a crossing until the other stage has come to it.
    """
    row_of = {item.stage: row for row, queue in enumerate(queues) for item in queue if isinstance(item, Action)}
    position = [0] * len(queues)
    made: set[Value] = set()
    there: set[Value] = set()

    def next_of(row: int) -> Action | Crossing | None:
        return queues[row][position[row]] if position[row] < len(queues[row]) else None

    def step(row: int) -> bool:
        item = next_of(row)
        if isinstance(item, Action):
            if not there.issuperset(values_needed(graph, item)):
                return False
            made.update(values_made(graph, item))
            for crossing in crossings_of(graph, item):
                if row_of[crossing.giver] == row_of[crossing.taker]:
                    there.update(values_of(crossing, graph))
            position[row] += 1
            return True
        if item is None or next_of(row_of[item.giver]) != item or next_of(row_of[item.taker]) != item:
            return False
        values = values_of(item, graph)
        if not made.issuperset(values):
            return False
        there.update(values)
        position[row_of[item.giver]] += 1
        position[row_of[item.taker]] += 1
        return True

    while any(step(row) for row in range(len(queues))):
        pass
    return [item for row in range(len(queues)) if (item := next_of(row)) is not None]


def check_plan(schedule: Schedule, graph: StageGraph) -> None:
    """All rows as they are, each crossing once at both of its ends, and an end."""
    queues = plan_queues(schedule, graph)
    assert not where_stuck(queues, graph)
    crossings = [crossing for action in schedule.actions() for crossing in crossings_of(graph, action)]
    assert len(set(crossings)) == len(crossings)
    for stage, queue in enumerate(queues):
        row = [action for action in schedule.actions() if action.stage == stage]
        assert [item for item in queue if isinstance(item, Action)] == row
        mine = [item for item in queue if isinstance(item, Crossing)]
        assert sorted(map(str, mine)) == sorted(str(one) for one in crossings if stage in (one.giver, one.taker))
    crossed = {value for crossing in crossings for value in values_of(crossing, graph)}
    assert crossed == {value for action in schedule.actions() for value in values_needed(graph, action)}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_every_known_schedule_is_queued_whole_and_ends(graph: StageGraph, name: str) -> None:
    for num_microbatches in (1, 3, 8):
        check_plan(SCHEDULES[name](graph.num_stages, num_microbatches), graph)


def random_graph(chance: random.Random) -> StageGraph:
    num_stages = chance.randint(1, 5)
    skips = [Edge(at, to, "skip") for at in range(num_stages) for to in range(at + 1, num_stages)]
    return StageGraph(num_stages, (*StageGraph.chain(num_stages).edges, *(e for e in skips if chance.random() < 0.4)))


@pytest.mark.parametrize("seed", seeds(60, quick=20))
def test_random_schedules_on_random_graphs_are_queued_whole_and_end(seed: int) -> None:
    chance = random.Random(seed)
    graph = random_graph(chance)
    check_plan(random_schedule(chance, graph, chance.randint(1, 6)), graph)


def moves(queues: tuple[Queue, ...], graph: StageGraph, state: State) -> Iterator[State]:
    """What a device may do next: with one stream it computes, with the other it gives and takes, each in order."""
    computed, crossed = state
    actions = [[item for item in queue if isinstance(item, Action)] for queue in queues]
    crossings = [[item for item in queue if isinstance(item, Crossing)] for queue in queues]
    there = {
        value
        for stage, done in enumerate(crossed)
        for one in crossings[stage][:done]
        if one.taker == stage
        for value in values_of(one, graph)
    }
    for stage, mine in enumerate(actions):
        if computed[stage] < len(mine) and there.issuperset(values_needed(graph, mine[computed[stage]])):
            yield tuple(at + (each == stage) for each, at in enumerate(computed)), crossed
    for stage, each in enumerate(crossings):
        if crossed[stage] == len(each) or each[crossed[stage]].giver != stage:
            continue
        one = each[crossed[stage]]
        others = crossings[one.taker][crossed[one.taker] : crossed[one.taker] + 1]
        made = any(one in crossings_of(graph, action) for action in actions[stage][: computed[stage]])
        if made and others == [one]:
            yield computed, tuple(at + (number in (stage, one.taker)) for number, at in enumerate(crossed))


def ends(queues: tuple[Queue, ...], graph: StageGraph) -> bool:
    """Whether devices come to the end of their queues, which is the same in every order of events."""
    start: State = ((0,) * len(queues), (0,) * len(queues))
    seen, waiting, last = {start}, [start], set()
    while waiting:
        state = waiting.pop()
        further = list(moves(queues, graph, state))
        if not further:
            last.add(state)
        for each in further:
            if each not in seen:
                seen.add(each)
                waiting.append(each)
    assert len(last) == 1, "whether they come to the end depends on the order"
    ((computed, crossed),) = last
    return sum(computed) + sum(crossed) == sum(map(len, queues))


@pytest.mark.parametrize("name", SCHEDULES)
def test_devices_end_in_every_order_of_events(name: str) -> None:
    for graph in (StageGraph.chain(2), StageGraph.chain(3), SKIPPING):
        assert ends(plan_queues(SCHEDULES[name](graph.num_stages, 3), graph), graph)


def as_needed(schedule: Schedule, graph: StageGraph) -> tuple[Queue, ...]:
    """What comes to mind first: give when it is made, take when it is needed."""
    crossings = [one for action in schedule.actions() for one in crossings_of(graph, action)]
    queues = []
    for stage in range(graph.num_stages):
        queue: list[Action | Crossing] = []
        for action in (one for one in schedule.actions() if one.stage == stage):
            needed = set(values_needed(graph, action))
            queue += [one for one in crossings if one.taker == stage and needed & set(values_of(one, graph))]
            queue += [action, *crossings_of(graph, action)]
        queues.append(tuple(queue))
    return tuple(queues)


def passes(queues: tuple[Queue, ...], graph: StageGraph) -> bool:
    return not where_stuck(queues, graph)


def test_to_give_what_is_made_and_take_what_is_needed_is_a_deadlock_and_refused() -> None:
    graph = StageGraph.chain(2)
    queues = as_needed(SCHEDULES["1f1b"](2, 3), graph)
    assert not ends(queues, graph)
    assert where_stuck(queues, graph) == [Crossing(0, 1, Pass.FORWARD, 1), Crossing(1, 0, Pass.BACKWARD, 0)]


def swapped(chance: random.Random, queues: tuple[Queue, ...]) -> tuple[Queue, ...]:
    """Some neighbours of one queue in the other order, rows as they are."""
    stage = chance.randrange(len(queues))
    queue = list(queues[stage])
    for at in range(len(queue) - 1):
        if chance.random() < 0.3 and not all(isinstance(item, Action) for item in queue[at : at + 2]):
            queue[at : at + 2] = queue[at + 1], queue[at]
    return tuple(tuple(queue) if each == stage else one for each, one in enumerate(queues))


@pytest.mark.parametrize("seed", seeds(200, quick=50))
def test_what_passes_the_check_ends_on_every_device(seed: int) -> None:
    chance = random.Random(seed)
    graph = chance.choice([StageGraph.chain(2), StageGraph.chain(3), SKIPPING])
    queues = swapped(chance, plan_queues(random_schedule(chance, graph, 2), graph))
    assert not passes(queues, graph) or ends(queues, graph)


def test_some_swaps_are_refused() -> None:
    chance, graph = random.Random(1), StageGraph.chain(2)
    planned = plan_queues(SCHEDULES["1f1b"](2, 3), graph)
    assert len({passes(swapped(chance, planned), graph) for _ in range(50)}) == 2


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), "deadlock"),
        (("0F0 0B0", "1F0 1B0"), "expected 1 F"),
    ],
)
def test_a_schedule_that_cannot_end_has_no_queues(rows: tuple[str, str], match: str) -> None:
    plan: Callable[[], object] = lambda: plan_queues(Schedule("mine", 2, 2, parse_rows(*rows)), StageGraph.chain(2))  # noqa: E731
    with pytest.raises(PipelineError, match=match):
        plan()


def test_a_stage_on_another_gpu_than_its_group_is_refused() -> None:
    check_device(torch.device("cpu"), torch.device("cuda", 0))
    check_device(torch.device("cuda", 1), torch.device("cuda", 1))
    with pytest.raises(PipelineError, match="is on cuda:1, its group over NCCL talks from cuda:0"):
        check_device(torch.device("cuda", 1), torch.device("cuda", 0))
