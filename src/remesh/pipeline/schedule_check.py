"""Checks of a schedule that need no times: all work is done, and no deadlock.

1. *Complete*: every stage does F once for every micro-batch, and B once, or I and W once; F before B or I, I before W.
2. *No deadlock*: ranks go through their rows, each action as soon as its values are made. If at last no rank can go on,
   the error names what each rank waits for. How far the ranks come does not depend on the order in which they are
   looked at, so one order is enough.

The checks of the graph are in `remesh.pipeline.graph`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from remesh.pipeline.actions import Action, ActionKind
from remesh.pipeline.edge_values import Pass, Value, values_made, values_needed
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.schedule import Schedule

_MAX_NAMED = 4
_KINDS = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)
_WHOLE_OR_SPLIT = ([1, 1, 0, 0], [1, 0, 1, 1])


def check_schedule(schedule: Schedule, graph: StageGraph) -> None:
    """`PipelineError` unless the schedule does all work of the graph's stages and comes to its end."""
    if schedule.num_stages != graph.num_stages:
        raise PipelineError(
            f"checking the schedule {schedule.name!r}: it has {schedule.num_stages} stages, its stage graph "
            f"{graph.num_stages}; build both for the same number"
        )
    _check_complete(schedule)
    for _ in order_of_progress(schedule, graph):
        pass


def _check_complete(schedule: Schedule) -> None:
    done: Counter[tuple[int, ActionKind, int | None]] = Counter()
    for action in schedule.actions():
        stage, kind, number = action.stage, action.kind, action.microbatch
        before = {ActionKind.F: None, ActionKind.W: ActionKind.I}.get(kind, ActionKind.F)
        if before is not None and not done[stage, before, number]:
            raise PipelineError(
                f"checking the schedule {schedule.name!r}: {action} needs {stage}{before}{number}, which comes later "
                "in the schedule or not at all; reorder the actions of that rank"
            )
        done[stage, kind, number] += 1
    for stage in range(schedule.num_stages):
        for number in range(schedule.num_microbatches):
            found = {kind: done[stage, kind, number] for kind in _KINDS}
            if list(found.values()) not in _WHOLE_OR_SPLIT:
                listed = ", ".join(f"{count} {kind}" for kind, count in found.items())
                raise PipelineError(
                    f"checking the schedule {schedule.name!r}: stage {stage} does micro-batch {number} with {listed}; "
                    "expected 1 F, and 1 B or 1 I and 1 W"
                )


def order_of_progress(schedule: Schedule, graph: StageGraph) -> Iterator[Action]:
    """All actions in an order in which they can be done: each rank in turn does what it can.

    `PipelineError` when no rank can go on: the schedule has a deadlock. Ranks take one action at a time, in turns.
    """
    waiting: set[Value] = set()
    position = [0] * len(schedule.rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            if position[rank] == len(row):
                continue
            action = row[position[rank]]
            needed = values_needed(graph, action)
            if not waiting.issuperset(needed):
                continue
            waiting.difference_update(needed)
            waiting.update(values_made(graph, action))
            position[rank] += 1
            moved = True
            yield action
    stuck = [
        _reason(row[position[rank]], rank, graph, waiting)
        for rank, row in enumerate(schedule.rows)
        if position[rank] < len(row)
    ]
    if stuck:
        more = f"; and {len(stuck) - _MAX_NAMED} ranks more" if len(stuck) > _MAX_NAMED else ""
        raise PipelineError(
            f"checking the schedule {schedule.name!r}: deadlock: {'; '.join(stuck[:_MAX_NAMED])}{more}; change the "
            "order of these rows"
        )


def _reason(action: Action, rank: int, graph: StageGraph, waiting: set[Value]) -> str:
    missing = next(value for value in values_needed(graph, action) if value not in waiting)
    edge = graph.edges[missing.edge]
    is_forward = missing.way is Pass.FORWARD
    maker = edge.source if is_forward else edge.target
    what = edge.name if is_forward else f"the gradient of {edge.name}"
    return f"rank {rank} is at {action} and waits for {what} of stage {maker}"
