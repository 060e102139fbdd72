"""Lower bound of a pipeline step's time, from work and links alone.

A rank and a line are *resources*. A step cannot be over before a resource has got its first work at the earliest
(*head*), has done all of it, and what at least follows its last work is done (*tail*). Heads and tails are longest
paths through the stage graph: one micro-batch goes forwards, then its gradients go backwards.

- A rank: head of F, all its F, I and W; or head of F, all its F and I, tail of I; or head of I, all its I, tail of I.
- A line: the earliest moment that it can carry something, all its transfers, the least tail of a transfer.

The largest of these is the bound. It holds for every schedule with one stage on each rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from remesh.pipeline.costs import Costs, Lines, StageCost
from remesh.pipeline.graph import StageGraph


@dataclass(frozen=True, slots=True)
class StepBound:
    """The lower bound of the step time, with its reason."""

    step_s: float
    reason: str


def compute_bound(graph: StageGraph, costs: Costs, num_microbatches: int) -> StepBound:
    """The bound of a step with this many micro-batches.

    >>> chain = StageGraph.chain(2)
    >>> compute_bound(chain, Costs.uniform(chain, transfer_s=0.5), 32)
    StepBound(step_s=97.5, reason='all work of stage 1')
    """
    costs.check_fits(graph)
    paths = LongestPaths(graph, costs)
    found = [*_of_stages(paths, num_microbatches), *_of_lines(paths, num_microbatches)]
    return max(found, key=lambda bound: bound.step_s)


class LongestPaths:
    """Heads and tails of every stage, in the unit of the costs."""

    def __init__(self, graph: StageGraph, costs: Costs) -> None:
        self.graph = graph
        self.costs = costs
        stages = range(graph.num_stages)
        self.forward_head_s = [0.0 for _ in stages]
        """When F of the first micro-batch can start."""
        self.backward_tail_s = [_after_gradient_s(cost) for cost in costs.stages]
        """From the end of an I to the end of the step."""
        edges = list(zip(graph.edges, costs.edges, strict=True))
        # Edges go upwards: sorted by one end, all longest paths to the other end are known when they are needed.
        for edge, cost in sorted(edges, key=lambda each: each[0].source):
            _raise(self.forward_head_s, edge.target, self._forward_end_s(edge.source) + cost.forward_s)
            back_s = cost.backward_s + gradient_s(costs.stages[edge.source]) + self.backward_tail_s[edge.source]
            _raise(self.backward_tail_s, edge.target, back_s)
        self.backward_head_s = [self._forward_end_s(stage) for stage in stages]
        """When I of the first micro-batch can start."""
        self.forward_tail_s = [cost.forward_s + self.gradient_tail_s(n) for n, cost in enumerate(costs.stages)]
        """From the start of an F to the end of the step."""
        for edge, cost in sorted(edges, key=lambda each: -each[0].target):
            ready_s = self.backward_head_s[edge.target] + gradient_s(costs.stages[edge.target]) + cost.backward_s
            _raise(self.backward_head_s, edge.source, ready_s)
            ahead_s = costs.stages[edge.source].forward_s + cost.forward_s + self.forward_tail_s[edge.target]
            _raise(self.forward_tail_s, edge.source, ahead_s)
        self.round_trip_s = [self.backward_head_s[n] - self.forward_head_s[n] for n in stages]
        """From the start of an F to that of its I, at least."""

    def _forward_end_s(self, stage: int) -> float:
        return self.forward_head_s[stage] + self.costs.stages[stage].forward_s

    def gradient_tail_s(self, stage: int) -> float:
        """The time from the start of an I to the end of the step."""
        return gradient_s(self.costs.stages[stage]) + self.backward_tail_s[stage]


def gradient_s(cost: StageCost) -> float:
    """The least time in which a stage makes the gradients of its inputs."""
    return min(cost.input_grad_s, cost.whole_backward_s)


def least_backward_s(cost: StageCost) -> float:
    """The least time of all of a stage's backward of a micro-batch."""
    return min(cost.input_grad_s + cost.weight_grad_s, cost.whole_backward_s)


def _after_gradient_s(cost: StageCost) -> float:
    return least_backward_s(cost) - gradient_s(cost)


def _raise(values: list[float], at: int, value: float) -> None:
    values[at] = max(values[at], value)


def _of_stages(paths: LongestPaths, num: int) -> Iterator[StepBound]:
    for stage, cost in enumerate(paths.costs.stages):
        head_s, gradients_s = paths.forward_head_s[stage], num * gradient_s(cost)
        tail_s = paths.backward_tail_s[stage]
        yield StepBound(head_s + num * (cost.forward_s + least_backward_s(cost)), f"all work of stage {stage}")
        yield StepBound(head_s + num * cost.forward_s + gradients_s + tail_s, f"F and I of stage {stage}")
        yield StepBound(
            paths.backward_head_s[stage] + gradients_s + tail_s, f"I of stage {stage}, after the round trip"
        )


def _of_lines(paths: LongestPaths, num: int) -> Iterator[StepBound]:
    """What every line carries as (head, time, tail) of each transfer."""
    carried: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    costs = paths.costs
    for edge, cost in zip(paths.graph.edges, costs.edges, strict=True):
        made_s = paths.forward_head_s[edge.source] + costs.stages[edge.source].forward_s
        forwards = (made_s, cost.forward_s, paths.forward_tail_s[edge.target])
        back_s = paths.backward_head_s[edge.target] + gradient_s(costs.stages[edge.target])
        backwards = (back_s, cost.backward_s, paths.gradient_tail_s(edge.source))
        for maker, taker, transfer in ((edge.source, edge.target, forwards), (edge.target, edge.source, backwards)):
            for line in names_of_lines(maker, taker, costs.lines):
                carried[line].append(transfer)
    for line, transfers in carried.items():
        head_s, tail_s = min(each[0] for each in transfers), min(each[2] for each in transfers)
        yield StepBound(head_s + num * sum(each[1] for each in transfers) + tail_s, f"transfers {line}")


def names_of_lines(maker: int, taker: int, lines: Lines) -> tuple[str, ...]:
    """What a transfer from stage to stage occupies, by names."""
    if lines is Lines.HOP:
        return (f"from stage {maker} to {taker}",)
    return f"out of stage {maker}", f"into stage {taker}"
