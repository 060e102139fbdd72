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
more where only their devices do.

torch's own pipelines put sends and receives in such a row, too (``_add_send_recv`` of torch.distributed.pipelining).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from remesh.pipeline.actions import Action
from remesh.pipeline.costs import Costs
from remesh.pipeline.edge_values import Pass, pass_of, values_made
from remesh.pipeline.graph import StageGraph
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


Queue = tuple[Action | Crossing, ...]


def plan_queues(schedule: Schedule, graph: StageGraph) -> tuple[Queue, ...]:
    """The queue of every row; `PipelineError` for a schedule that does not fit the graph or has a deadlock.

    >>> from remesh.pipeline.schedules import one_f_one_b
    >>> plan_queues(one_f_one_b(2, 1), StageGraph.chain(2))[1][0]
    Crossing(giver=0, taker=1, way=<Pass.FORWARD: 0>, microbatch=0)
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
    if way is None:
        return
    edges = [graph.edges[value.edge] for value in made]
    for taker in sorted({edge.target if way is Pass.FORWARD else edge.source for edge in edges}):
        yield Crossing(action.stage, taker, way, action.microbatch)
