"""Simulation of a schedule in time: start and end of every action and transfer of a step.

Model. A rank computes one action at a time, in the order of its row. An action starts when the rank is free and all
values that it needs are there. When it ends, what it made is posted.

- *Asynchronous* transfers cost the ranks nothing. They are served in the order in which they are posted, and each
  starts when every line that it occupies is free; nothing overtakes.
- *Blocking* transfers cost both ranks, one after the other: after an action the rank spends the time of everything that
  it sends, before an action, once it is free and the value is made, the time of everything that it receives. No rank
  waits for a taker to be ready, so every schedule that passes its check ends. (A rank of the runtime takes values in
  while it computes, and may be faster than this model, the one of published comparisons.)

Between stages on one rank a value takes no time.

Algorithm. Ends of actions are handled in the order of time. When the end of an action is handled, its transfers are
posted, so their ends are known; then every rank that has all values of its next action posted knows when that ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from remesh.pipeline.actions import Action
from remesh.pipeline.costs import Costs
from remesh.pipeline.edge_values import Value, pass_of
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.player import Played, Player
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.schedule_check import check_schedule


class Transfers(StrEnum):
    """Whether ranks compute while values are in transit."""

    ASYNC = "async"
    """They do."""
    BLOCKING = "blocking"
    """They block, and handle one value at a time."""


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action of a simulated step."""

    action: Action
    start_s: float
    end_s: float
    waited_s: float
    """How long its rank was idle before it although the values were made already: what communication cost."""


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """A value on its way in a simulated step."""

    value: Value
    ranks: tuple[int, int]
    """The rank that made it, the rank that needs it."""
    post_s: float
    """When it was made."""
    start_s: float
    end_s: float
    """Invariant: ``post_s <= start_s <= end_s <= use_s``."""
    use_s: float
    """When the action that needs it starts."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """The simulated times and memory of a schedule."""

    actions: tuple[tuple[TimedAction, ...], ...]
    """In the order of the schedule's rows."""
    transfers: tuple[TimedTransfer, ...]
    """In the order in which they get their turn; none of blocking ones, which are part of the ranks' time."""

    @property
    def step_s(self) -> float:
        """The time at which the last action ends."""
        return max((row[-1].end_s for row in self.actions if row), default=0.0)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(sum(timed.end_s - timed.start_s for timed in row) for row in self.actions)

    @property
    def waited_s(self) -> tuple[float, ...]:
        """Time that each rank was blocked by communication alone."""
        return tuple(sum(timed.waited_s for timed in row) for row in self.actions)


def simulate_schedule(
    schedule: Schedule, graph: StageGraph, costs: Costs, *, transfers: Transfers = Transfers.ASYNC
) -> Simulation:
    """Play a schedule through; `PipelineError` when it does not fit the graph or has a deadlock.

    >>> from remesh.pipeline.schedules import one_f_one_b
    >>> chain = StageGraph.chain(2)
    >>> [simulate_schedule(one_f_one_b(2, 32), chain, Costs.uniform(chain, transfer_s=c)).step_s for c in (0, 1)]
    [99.0, 131.0]
    """
    check_schedule(schedule, graph)
    row_of = schedule.row_of
    player = Player(
        graph, costs, [row_of[s] for s in range(graph.num_stages)], is_blocking=transfers is Transfers.BLOCKING
    )
    played = player.play(schedule.rows, schedule.num_microbatches)
    rows = tuple(tuple(_timed_row(row, number, played)) for number, row in enumerate(schedule.rows))
    used_s = {
        (pass_of(timed.action.kind), timed.action.stage, timed.action.microbatch): timed.start_s
        for row in rows
        for timed in row
    }
    return Simulation(
        rows,
        tuple(
            TimedTransfer(
                Value(route.edge, route.way, number),
                route.ranks,
                post_s,
                start_s,
                end_s,
                used_s[route.way, route.taker, number],
            )
            for route, number, post_s, start_s, end_s in played.transfers
        ),
    )


def compute_signal_bound_s(schedule: Schedule, graph: StageGraph, costs: Costs) -> float:
    """The step time of the same schedule if all transfers took no time: a run with messages of one byte."""
    return simulate_schedule(schedule, graph, costs.without_transfers()).step_s


def _timed_row(row: Iterable[Action], number: int, played: Played) -> Iterable[TimedAction]:
    free_s = 0.0
    for action, start_s, end_s in zip(row, played.starts[number], played.ends[number], strict=True):
        way = pass_of(action.kind)
        made_s = 0.0 if way is None else played.posted[way][action.stage][action.microbatch]
        yield TimedAction(action, start_s, end_s, start_s - max(free_s, made_s))
        free_s = end_s
