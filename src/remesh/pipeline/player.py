"""Discrete-event engine under `remesh.pipeline.step_simulation` and `remesh.pipeline.search`.

The model is described in `remesh.pipeline.step_simulation`. Ends of actions are handled in the order of time, so
transfers are posted in the order of time, and an end never changes once it is known. Everything is numbered beforehand,
for a search plays hundreds of schedules; what is recorded are plain numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from remesh.pipeline.actions import Action, ActionKind
from remesh.pipeline.costs import Costs, Lines
from remesh.pipeline.edge_values import Pass
from remesh.pipeline.graph import StageGraph

_F, _W = ActionKind.F, ActionKind.W


@dataclass(frozen=True, slots=True)
class EdgeRoute:
    """What the values of an edge meet on their way in one pass."""

    edge: int
    """Number of the edge."""
    way: Pass
    taker: int
    """The stage that needs them."""
    ranks: tuple[int, int]
    """Of the stage that makes them and of the taker; equal if nothing is sent."""
    time_s: float
    lines: tuple[int, int]
    """Numbers of the lines that a transfer occupies; twice the same if it is one."""


@dataclass(slots=True)
class Played:
    """What happened, by numbers."""

    starts: list[list[float]]
    """Of the actions of each row; of all of them exactly if the rows came to their end."""
    ends: list[list[float]]
    posted: list[list[list[float]]]
    """``[pass][stage][micro-batch]``: when the last value that the stage needs was made."""
    transfers: list[tuple[EdgeRoute, int, float, float, float]] = field(default_factory=list)
    """(route, micro-batch, post, start, end) of asynchronous transfers, in the order of posting."""

    @property
    def step_s(self) -> float:
        """The time at which the last action ends."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)


class Player:
    """Plays schedules on one graph with one placement of stages on ranks and one set of costs, again and again."""

    def __init__(self, graph: StageGraph, costs: Costs, row_of: Sequence[int], *, is_blocking: bool = False) -> None:
        costs.check_fits(graph)
        self._row_of = row_of
        self._is_blocking = is_blocking
        self.durations = [
            {_F: c.forward_s, ActionKind.B: c.whole_backward_s, ActionKind.I: c.input_grad_s, _W: c.weight_grad_s}
            for c in costs.stages
        ]
        numbers: dict[tuple[object, ...], int] = {}
        stages = range(graph.num_stages)
        # [pass][stage]: what leaves a stage, how many values it needs, how long a blocked rank sends and receives.
        self.made: list[list[list[EdgeRoute]]] = [[[] for _ in stages] for _ in Pass]
        self.num_needed = [[0 for _ in stages] for _ in Pass]
        self._send_s = [[0.0 for _ in stages] for _ in Pass]
        self._receive_s = [[0.0 for _ in stages] for _ in Pass]
        for number, (edge, cost) in enumerate(zip(graph.edges, costs.edges, strict=True)):
            for way, maker, taker, time_s in (
                (Pass.FORWARD, edge.source, edge.target, cost.forward_s),
                (Pass.BACKWARD, edge.target, edge.source, cost.backward_s),
            ):
                ranks = row_of[maker], row_of[taker]
                keys = (("out", ranks[0]), ("in", ranks[1])) if costs.lines is Lines.NIC else (ranks, ranks)
                lines = [numbers.setdefault(key, len(numbers)) for key in keys]
                self.made[way][maker].append(EdgeRoute(number, way, taker, ranks, time_s, (lines[0], lines[1])))
                self.num_needed[way][taker] += 1
                if ranks[0] != ranks[1]:
                    self._send_s[way][maker] += time_s
                    self._receive_s[way][taker] += time_s
        self.num_lines = len(numbers)

    def play(self, rows: Sequence[Sequence[Action]], num_microbatches: int) -> Played:
        """Start and end of every action that gets its turn."""
        missing = [[[number] * num_microbatches for number in of_pass] for of_pass in self.num_needed]
        arrived = [[[0.0] * num_microbatches for _ in of_pass] for of_pass in self.num_needed]
        posted = [[[0.0] * num_microbatches for _ in of_pass] for of_pass in self.num_needed]
        played = Played([[] for _ in rows], [[] for _ in rows], posted)
        line_free = [0.0] * self.num_lines
        free = [0.0] * len(rows)
        is_idle = [True] * len(rows)
        ends: list[tuple[float, int]] = []

        def begin(rank: int) -> None:
            starts = played.starts[rank]
            if len(starts) == len(rows[rank]):
                return
            action = rows[rank][len(starts)]
            stage, kind, start_s = action.stage, action.kind, free[rank]
            if kind is not _W:
                way, number = kind is not _F, action.microbatch
                if missing[way][stage][number]:
                    return
                start_s = max(start_s, arrived[way][stage][number])
                if self._is_blocking:
                    start_s += self._receive_s[way][stage]
            starts.append(start_s)
            is_idle[rank] = False
            heapq.heappush(ends, (start_s + self.durations[stage][kind], rank))

        def post(route: EdgeRoute, number: int, now_s: float) -> None:
            end_s = now_s
            if route.ranks[0] != route.ranks[1] and not self._is_blocking:
                first, second = route.lines
                start_s = max(now_s, line_free[first], line_free[second])
                end_s = line_free[first] = line_free[second] = start_s + route.time_s
                played.transfers.append((route, number, now_s, start_s, end_s))
            stages = arrived[route.way]
            stages[route.taker][number] = max(stages[route.taker][number], end_s)
            posted[route.way][route.taker][number] = now_s
            missing[route.way][route.taker][number] -= 1
            if is_idle[route.ranks[1]] and not missing[route.way][route.taker][number]:
                begin(route.ranks[1])

        for rank in range(len(rows)):
            begin(rank)
        while ends:
            now_s, rank = heapq.heappop(ends)
            played.ends[rank].append(now_s)
            free[rank] = now_s
            action = rows[rank][len(played.ends[rank]) - 1]
            if action.kind is not _W:
                way = action.kind is not _F
                if self._is_blocking:
                    free[rank] += self._send_s[way][action.stage]
                for route in self.made[way][action.stage]:
                    post(route, action.microbatch, now_s)
            is_idle[rank] = True
            begin(rank)
        return played
