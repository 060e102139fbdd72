"""Pipeline parallelism: schedules as tables of actions, and a runtime whose edges are reshard plans.

Schedules, checks, the simulator and the search are pure and need no torch. What does (`Pipeline`, `Stage`,
`split_model`) is imported at its first use.
"""

from typing import TYPE_CHECKING, Any

from remesh.first_use import attribute_at_home
from remesh.pipeline.actions import Action, ActionKind
from remesh.pipeline.bound import StepBound, compute_bound
from remesh.pipeline.check import check_schedule
from remesh.pipeline.costs import Costs, EdgeCost, Lines, StageCost
from remesh.pipeline.graph import Edge, StageGraph
from remesh.pipeline.peaks import Peak, check_memory, compute_peaks
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.schedules import (
    SCHEDULES,
    build_schedule,
    eager_one_f_one_b,
    eager_split,
    gpipe,
    one_f_one_b,
    one_f_one_b_split,
    zero_bubble_h1,
)
from remesh.pipeline.search import Found, search_schedule
from remesh.pipeline.simulate import Simulation, Transfers, compute_signal_bound_s, simulate_schedule

if TYPE_CHECKING:
    from remesh.pipeline.edges import Payload
    from remesh.pipeline.runtime import Pipeline
    from remesh.pipeline.split import Parts, split_model
    from remesh.pipeline.stage import Stage
    from remesh.pipeline.step import StepReport
    from remesh.pipeline.tuning import gather_costs

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Costs",
    "Edge",
    "EdgeCost",
    "Found",
    "Lines",
    "Parts",
    "Payload",
    "Peak",
    "Pipeline",
    "PipelineError",
    "Schedule",
    "Simulation",
    "Stage",
    "StageCost",
    "StageGraph",
    "StepBound",
    "StepReport",
    "Transfers",
    "build_schedule",
    "check_memory",
    "check_schedule",
    "compute_bound",
    "compute_peaks",
    "compute_signal_bound_s",
    "eager_one_f_one_b",
    "eager_split",
    "gather_costs",
    "gpipe",
    "one_f_one_b",
    "one_f_one_b_split",
    "search_schedule",
    "simulate_schedule",
    "split_model",
    "zero_bubble_h1",
]

_HOMES = {
    "Parts": "remesh.pipeline.split",
    "Payload": "remesh.pipeline.edges",
    "Pipeline": "remesh.pipeline.runtime",
    "Stage": "remesh.pipeline.stage",
    "StepReport": "remesh.pipeline.step",
    "gather_costs": "remesh.pipeline.tuning",
    "split_model": "remesh.pipeline.split",
}


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        return attribute_at_home(__name__, _HOMES, name)
