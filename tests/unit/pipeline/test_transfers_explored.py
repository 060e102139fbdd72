"""The check, the simulator and what the runtime does agree on which schedules come to their end.

The runtime's rules are told once more here, and every order in which ranks and lanes may come on is tried:

- a rank does its next action once all values that it needs have arrived;
- with blocking transfers it goes on only once everything that it gave has left;
- a lane has the values of one pair of stages and direction, and carries them in the order in which they are made.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from remesh.pipeline.actions import Action
from remesh.pipeline.costs import Costs
from remesh.pipeline.edge_values import Value, values_made, values_needed
from remesh.pipeline.graph import Edge, StageGraph
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.schedule_check import check_schedule
from remesh.pipeline.schedules import SCHEDULES
from remesh.pipeline.step_simulation import Transfers, simulate_schedule
from tests.profiles import seeds
from tests.unit.pipeline.cases import parse_rows, random_schedule

SKIPPING = StageGraph(3, (Edge(0, 1, "h"), Edge(1, 2, "h"), Edge(0, 2, "skip")))
State = tuple[tuple[int, ...], frozenset[Value]]
"""How many actions every rank has done, and which values are on their way."""


def moves(schedule: Schedule, graph: StageGraph, transfers: Transfers, state: State) -> Iterator[State]:
    """What may happen next."""
    positions, under_way = state
    done = [row[:at] for row, at in zip(schedule.rows, positions, strict=True)]
    made = [value for actions in done for action in actions for value in values_made(graph, action)]
    for rank, row in enumerate(schedule.rows):
        if positions[rank] == len(row):
            continue
        mine = {value for action in done[rank] for value in values_made(graph, action)}
        is_held = transfers is Transfers.BLOCKING and bool(mine & under_way)
        if not is_held and set(made).difference(under_way).issuperset(values_needed(graph, row[positions[rank]])):
            new = values_made(graph, row[positions[rank]])
            yield tuple(at + (each == rank) for each, at in enumerate(positions)), under_way.union(new)
    first: set[tuple[int, int]] = set()
    for value in made:  # of each lane in the order in which they were made
        lane = (value.edge, value.way)
        if value in under_way and lane not in first:
            first.add(lane)
            yield positions, under_way - {value}


def ends(schedule: Schedule, graph: StageGraph, transfers: Transfers) -> bool:
    """Whether the ranks come to the end of their rows in every order of events; never in some orders only."""
    start: State = ((0,) * len(schedule.rows), frozenset())
    seen, waiting, last = {start}, [start], set()
    while waiting:
        state = waiting.pop()
        further = list(moves(schedule, graph, transfers, state))
        if not further:
            last.add(state[0])
        for each in further:
            if each not in seen:
                seen.add(each)
                waiting.append(each)
    assert len(last) == 1, "whether they come to the end depends on the order"
    return last == {tuple(map(len, schedule.rows))}


def passes(schedule: Schedule, graph: StageGraph) -> bool:
    try:
        check_schedule(schedule, graph)
    except PipelineError:
        return False
    return True


def simulates(schedule: Schedule, graph: StageGraph, transfers: Transfers) -> bool:
    try:
        return simulate_schedule(schedule, graph, Costs.uniform(graph), transfers=transfers).step_s > 0
    except PipelineError:
        return False


@pytest.mark.parametrize("transfers", Transfers)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_known_schedule_comes_to_its_end(name: str, transfers: Transfers) -> None:
    for graph in (StageGraph.chain(2), StageGraph.chain(3), SKIPPING):
        schedule = SCHEDULES[name](graph.num_stages, 3)
        assert ends(schedule, graph, transfers)
        assert passes(schedule, graph) and simulates(schedule, graph, transfers)


def shuffled(chance: random.Random, schedule: Schedule) -> Schedule:
    """Rows in another order, in which every action still comes after those of its own stage that it needs."""
    rows = []
    for row in schedule.rows:
        left, done = list(row), list[Action]()
        while left:
            free = [
                one for one in left if not any(other.microbatch == one.microbatch for other in left[: left.index(one)])
            ]
            done.append(chance.choice(free))
            left.remove(done[-1])
        rows.append(tuple(done))
    return Schedule("shuffled", schedule.num_stages, schedule.num_microbatches, tuple(rows))


@pytest.mark.parametrize("seed", seeds(40, quick=10))
def test_a_schedule_that_passes_ends_and_one_that_does_not_hangs(seed: int) -> None:
    chance = random.Random(seed)
    graph = chance.choice([StageGraph.chain(2), SKIPPING])
    schedule = shuffled(chance, random_schedule(chance, graph, 2))
    for transfers in Transfers:
        found = {passes(schedule, graph), ends(schedule, graph, transfers), simulates(schedule, graph, transfers)}
        assert len(found) == 1, transfers


def test_a_deadlock_is_one_with_both_kinds_of_transfers() -> None:
    schedule = Schedule("mine", 2, 2, parse_rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    for transfers in Transfers:
        assert not ends(schedule, StageGraph.chain(2), transfers)
        assert not simulates(schedule, StageGraph.chain(2), transfers)
