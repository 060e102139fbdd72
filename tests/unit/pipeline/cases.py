"""Stage graphs, costs and a step played by hand: what several tests of the room share."""

from __future__ import annotations

import random
from collections.abc import Sequence

from remesh.pipeline.actions import Action, ActionKind
from remesh.pipeline.costs import Costs, EdgeCost, Lines, StageCost
from remesh.pipeline.edge_values import values_made, values_needed
from remesh.pipeline.graph import Edge, StageGraph
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.schedules import build_schedule

U_SHAPE = StageGraph(4, (Edge(0, 1, "h"), Edge(1, 2, "h"), Edge(2, 3, "h"), Edge(0, 3, "skip"), Edge(1, 2, "skip")))
"""A U-shaped model in four stages: the first half gives to its mirror image."""


def parse_rows(*rows: str) -> tuple[tuple[Action, ...], ...]:
    """Rows of actions from their strings."""
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


def random_costs(chance: random.Random, graph: StageGraph, lines: Lines) -> Costs:
    """Whole numbers, so that a clock that ticks can follow."""
    return Costs(
        tuple(
            StageCost(*(chance.randint(1, 5) for _ in range(3)), stash_bytes=chance.randint(1, 9))
            for _ in range(graph.num_stages)
        ),
        tuple(EdgeCost(chance.randint(1, 6), chance.randint(1, 6)) for _ in graph.edges),
        lines,
    )


def random_schedule(chance: random.Random, graph: StageGraph, num_microbatches: int) -> Schedule:
    """Any warm-ups that fall from stage to stage, any delays."""
    warmups = sorted((chance.randint(1, num_microbatches) for _ in range(graph.num_stages)), reverse=True)
    delays = [chance.choice((None, 0, 1, 2)) for _ in warmups]
    return build_schedule("random", num_microbatches, warmups, delays)


def duration(costs: Costs, action: Action) -> float:
    """How long an action takes."""
    cost = costs.stages[action.stage]
    return {
        ActionKind.F: cost.forward_s,
        ActionKind.B: cost.whole_backward_s,
        ActionKind.I: cost.input_grad_s,
        ActionKind.W: cost.weight_grad_s,
    }[action.kind]


def tick_through(schedule: Schedule, graph: StageGraph, costs: Costs) -> list[list[tuple[int, int]]]:
    """Start and end of every action by a clock that ticks: slow, and with nothing clever in it.

    All costs are whole numbers >= 1. At every tick, in this order: what is over ends, and is posted by rank; of what is
    posted, in that order, everything starts that finds its lines free, unless somebody posted before waits for one of
    them; ranks start what they can.
    """
    row_of = schedule.row_of
    found: list[list[tuple[int, int]]] = [[] for _ in schedule.rows]
    position, until = [0] * len(schedule.rows), [0] * len(schedule.rows)
    posted: list[tuple[object, tuple[object, ...], int]] = []
    under_way: list[tuple[int, object, tuple[object, ...]]] = []
    there: set[object] = set()
    now = 0
    while any(len(times) < len(row) for times, row in zip(found, schedule.rows, strict=True)) or max(until) > now:
        there |= {value for end, value, _ in under_way if end <= now}
        under_way = [each for each in under_way if each[0] > now]
        for rank, row in enumerate(schedule.rows):
            if len(found[rank]) > position[rank] and until[rank] == now:
                _post(graph, costs, row_of, row[position[rank]], posted, there)
                position[rank] += 1
        taken = {line for _, _, lines in under_way for line in lines}
        for each in list(posted):
            value, lines, time = each
            if not taken.intersection(lines):
                under_way.append((now + time, value, lines))
                posted.remove(each)
            taken.update(lines)
        for rank, row in enumerate(schedule.rows):
            at = position[rank]
            needed = values_needed(graph, row[at]) if at < len(row) else ()
            if len(found[rank]) == at < len(row) and there.issuperset(needed):
                until[rank] = now + int(duration(costs, row[at]))
                found[rank].append((now, until[rank]))
        now += 1
        assert now < 100_000
    return found


def _post(
    graph: StageGraph,
    costs: Costs,
    row_of: dict[int, int],
    action: Action,
    posted: list[tuple[object, tuple[object, ...], int]],
    there: set[object],
) -> None:
    for value in values_made(graph, action):
        edge, cost = graph.edges[value.edge], costs.edges[value.edge]
        ends: Sequence[int] = (edge.source, edge.target) if action.kind is ActionKind.F else (edge.target, edge.source)
        giver, taker = (row_of[stage] for stage in ends)
        if giver == taker:
            there.add(value)
            continue
        lines = (("out", giver), ("in", taker)) if costs.lines is Lines.NIC else ((giver, taker),)
        time_s = cost.forward_s if action.kind is ActionKind.F else cost.backward_s
        posted.append((value, lines, int(time_s)))
