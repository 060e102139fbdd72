"""Pipeline parallelism: schedules as tables of actions, and a runtime whose edges are reshard plans.

Schedules, checks, the simulator and the search are pure and need no torch. What does (`Pipeline`, `Stage`,
`split_model`) is imported at its first use.
"""

from typing import TYPE_CHECKING

from remesh.foundation.first_use import names_at_first_use

if TYPE_CHECKING:
    from remesh.pipeline.actions import Action as Action, ActionKind as ActionKind
    from remesh.pipeline.costs import Costs as Costs, EdgeCost as EdgeCost, Lines as Lines, StageCost as StageCost
    from remesh.pipeline.graph import Edge as Edge, StageGraph as StageGraph, Tie as Tie
    from remesh.pipeline.peaks import Peak as Peak, compute_peaks as compute_peaks
    from remesh.pipeline.pipeline_error import PipelineError as PipelineError
    from remesh.pipeline.running.edges import Payload as Payload
    from remesh.pipeline.running.runtime import Pipeline as Pipeline
    from remesh.pipeline.running.split import Parts as Parts, split_model as split_model
    from remesh.pipeline.running.stage import Stage as Stage
    from remesh.pipeline.running.step_runner import StepReport as StepReport
    from remesh.pipeline.running.tuning import gather_costs as gather_costs
    from remesh.pipeline.schedule import Schedule as Schedule
    from remesh.pipeline.schedule_check import check_schedule as check_schedule
    from remesh.pipeline.schedules import (
        SCHEDULES as SCHEDULES,
        build_schedule as build_schedule,
        eager_one_f_one_b as eager_one_f_one_b,
        eager_split as eager_split,
        gpipe as gpipe,
        one_f_one_b as one_f_one_b,
        one_f_one_b_split as one_f_one_b_split,
        zero_bubble_h1 as zero_bubble_h1,
    )
    from remesh.pipeline.search import Found as Found, search_schedule as search_schedule
    from remesh.pipeline.step_bound import StepBound as StepBound, compute_bound as compute_bound
    from remesh.pipeline.step_simulation import (
        Simulation as Simulation,
        Transfers as Transfers,
        compute_signal_bound_s as compute_signal_bound_s,
        simulate_schedule as simulate_schedule,
    )
else:
    __getattr__, __dir__ = names_at_first_use(__name__)
