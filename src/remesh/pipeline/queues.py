"""Common order of compute and messages on all ranks of a pipeline, for NCCL, whose messages have no tags.

Over NCCL the operations of a communicator are carried out one after the other, in the order in which a rank has queued
them, and each waits until the other rank has come to it, too. Two ranks that queue the same two operations in another
order wait for each other for ever.

Definitions. A *crossing* is what goes from one stage to another in one pass for one micro-batch: the values of all
edges between them. A *queue* is all that the ranks of a row of the schedule do in a step, in order: the actions of
their stages, and the crossings that these give or take. Between stages of one row nothing crosses.

Algorithm. All actions stand in one row, in the order in which they would end if stages were alike and values took no
time to arrive. Behind each stand the crossings of what it makes. A queue is this row without what is not its own.

So it ends: of all that is not done, what comes first in the row comes first in every queue that has it, and all that it
needs is done. That holds of ranks that block in every crossing until the other side has come to it, and all the
more where only their devices do. `check_queues` knows nothing of the row: it plays the queues through.

torch's own pipelines put sends and receives in such a row, too (``_add_send_recv`` of torch.distributed.pipelining).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remesh.pipeline.actions import Action
from remesh.pipeline.costs import Costs
from remesh.pipeline.edge_values import Pass, Value, pass_of, values_made, values_needed
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.step_simulation import simulate_schedule


@dataclass(frozen=True, slots=True)
class Crossing:
    """All values of a pass that go from one stage to another for a micro-batch."""

    giver: int
    """The stage that makes them."""
    taker: int
    """The stage that needs them."""
    way: Pass
    microbatch: int

    def __str__(self) -> str:
        what = "values" if self.way is Pass.FORWARD else "gradients"
        return f"the {what} of micro-batch {self.microbatch} from stage {self.giver} to {self.taker}"

    def values(self, graph: StageGraph) -> tuple[Value, ...]:
        """What crosses."""
        ends = (self.giver, self.taker) if self.way is Pass.FORWARD else (self.taker, self.giver)
        return tuple(
            Value(number, self.way, self.microbatch)
            for number, edge in enumerate(graph.edges)
            if (edge.source, edge.target) == ends
        )


Queue = tuple[Action | Crossing, ...]


def plan_queues(schedule: Schedule, graph: StageGraph) -> tuple[Queue, ...]:
    """The queue of every row; `PipelineError` for a schedule that does not fit the graph or has a deadlock.

    >>> from remesh.pipeline.schedules import one_f_one_b
    >>> [str(item) for item in plan_queues(one_f_one_b(2, 1), StageGraph.chain(2))[1]][:2]
    ['the values of micro-batch 0 from stage 0 to 1', '1F0']
    """
    played = simulate_schedule(schedule, graph, Costs.uniform(graph))
    in_time = sorted((timed for row in played.actions for timed in row), key=lambda one: (one.end_s, one.action.stage))
    row_of = schedule.row_of
    queues: list[list[Action | Crossing]] = [[] for _ in schedule.rows]
    for timed in in_time:
        queues[row_of[timed.action.stage]].append(timed.action)
        for crossing in crossings_of(graph, timed.action):
            if row_of[crossing.giver] != row_of[crossing.taker]:
                queues[row_of[crossing.giver]].append(crossing)
                queues[row_of[crossing.taker]].append(crossing)
    return tuple(map(tuple, queues))


def crossings_of(graph: StageGraph, action: Action) -> Iterator[Crossing]:
    """How what an action makes leaves, to one stage after the other."""
    way, made = pass_of(action.kind), values_made(graph, action)
    if way is None or action.microbatch is None:
        return
    edges = [graph.edges[value.edge] for value in made]
    for taker in sorted({edge.target if way is Pass.FORWARD else edge.source for edge in edges}):
        yield Crossing(action.stage, taker, way, action.microbatch)


def check_queues(queues: Sequence[Queue], graph: StageGraph) -> None:
    """`PipelineError` unless every row gets to the end of its queue.

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
                    there.update(crossing.values(graph))
            position[row] += 1
            return True
        if item is None or next_of(row_of[item.giver]) != item or next_of(row_of[item.taker]) != item:
            return False
        values = item.values(graph)
        if not made.issuperset(values):
            return False
        there.update(values)
        position[row_of[item.giver]] += 1
        position[row_of[item.taker]] += 1
        return True

    while any(step(row) for row in range(len(queues))):
        pass
    stuck = [f"row {row} is at {item}" for row in range(len(queues)) if (item := next_of(row)) is not None]
    if stuck:
        raise PipelineError(
            f"checking what the stages of a pipeline queue: expected an order in which all come to their end, found a "
            f"deadlock: {'; '.join(stuck)}; let both ends of a crossing queue it in one order"
        )
