"""Measured costs of a pipeline: from the report of a real step to the numbers of simulation and search.

Compute times are medians of a stage's actions, of its slowest rank. Transfer times are the bytes that the plan of an
edge puts on the busiest NIC (none between ranks of one host), over the rate of the NICs: what a step measures of its
transfers is mixed with waiting, what `remesh net probe` measures is not.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from typing import Any

from remesh.comm.gather import gather_from
from remesh.foundation.torch_private import never_compiled
from remesh.pipeline.actions import ActionKind
from remesh.pipeline.costs import Costs, EdgeCost, Lines, StageCost
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.running.runtime import Pipeline
from remesh.pipeline.running.step_runner import StepReport

_DOING = "gathering what a pipeline step cost"


@never_compiled
def gather_costs(pipeline: Pipeline, report: StepReport, rate_bytes_per_s: float, lines: Lines = Lines.NIC) -> Costs:
    """The costs of the pipeline's graph, the same on all ranks; a stash counts as 1 byte.

    Called by every rank of the pipeline with its own report of one step; blocks until all have called it. Of a step
    with whole backwards all of their time is that of the weights' gradients: take one with the backward split, such as
    ``1f1b-split``, to know both parts. `PipelineError` on all ranks for a rate that is none.

    The costs go to `search_schedule`, and a new `Pipeline` with the schedule that it finds.
    """

    def tell() -> list[Any]:
        if not rate_bytes_per_s > 0:
            raise PipelineError(f"{_DOING}: expected a rate above 0 bytes per second, found {rate_bytes_per_s}")
        times: dict[tuple[int, ActionKind], list[float]] = {}
        for span in report.spans:
            times.setdefault((span.action.stage, span.action.kind), []).append(span.end_s - span.start_s)
        return [[stage, kind, statistics.median(each)] for (stage, kind), each in times.items()]

    slowest: dict[int, dict[str, float]] = {}
    for stage, kind, seconds in itertools.chain(*gather_from(tell, pipeline.group, _DOING)):
        known = slowest.setdefault(stage, {})
        known[kind] = max(seconds, known.get(kind, 0.0))
    stages = tuple(_stage_cost(slowest[index]) for index in range(pipeline.graph.num_stages))
    edges = []
    for edge in pipeline.graph.edges:
        forward, backward = pipeline.edge_bytes(edge)
        edges.append(EdgeCost(forward / rate_bytes_per_s, backward / rate_bytes_per_s))
    return Costs(stages, tuple(edges), lines)


def _stage_cost(times: Mapping[str, float]) -> StageCost:
    weights_s = times.get("W", times.get("B", 0.0))
    return StageCost(times.get("F", 0.0), times.get("I", 0.0), weights_s, stash_bytes=1)
