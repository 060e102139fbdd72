"""Pipeline runtime: the ranks meet, plan how values go from stage to stage, and train a step.

One step on one rank, in order:

0. Before the first one all ranks meet: each reports its stage, its host, and a digest of all that must be alike.
1. All ranks exchange the shapes of their batch, in one small gather. Known shapes have their plans already; a step with
   new ones is opened (`remesh.pipeline.running.opening`). What is wrong is raised here, on all ranks alike.
2. The rank takes its part in the step (`remesh.pipeline.running.step_runner`).

After an error in a step meet again in a new group, and take the step again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch

from remesh.comm.gather import Group, gather_from, group_device, group_rank, is_queued
from remesh.device.streams import SideStream
from remesh.foundation.options import check_options
from remesh.foundation.torch_private import never_compiled
from remesh.layout.from_torch import dtype_name
from remesh.pipeline.actions import Action
from remesh.pipeline.graph import Edge, StageGraph
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.queues import plan_queues
from remesh.pipeline.running.edges import Payload, StageRoute, plan_route
from remesh.pipeline.running.meeting import Places, device_of, gather_places
from remesh.pipeline.running.opening import Opened, StepOpening, share_of_loss
from remesh.pipeline.running.stage import Stage, cut_microbatches
from remesh.pipeline.running.step_runner import DOING, StepPart, StepReport, StepRun
from remesh.pipeline.running.tied import TiedWeights
from remesh.pipeline.running.values import EdgeEnd
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.schedule_check import check_schedule
from remesh.pipeline.step_simulation import Transfers
from remesh.resharding.model.tasks import SumOrder
from remesh.resharding.planning.transfer import PlanOptions

_MAX_VALUE_CHARS = 64
"""Characters of an option's value in an error; a longer one is named by its digest."""
Entry = torch.Tensor | Sequence[torch.Tensor]
Entries = Mapping[str, Entry]


class PipelineOptions(PlanOptions, total=False):
    """The options of a pipeline besides its schedule."""

    transfers: Transfers
    """Beside the compute, as by default, or blocking: no rank computes while a send of its own is on its way. Takers
    take in what comes whatever they do, so every schedule that passes its check comes to its end either way."""
    payload: Payload
    """What crosses the links; the values by default."""


@never_compiled
class Pipeline:
    """A model in stages that trains by a schedule; each row of the schedule has its own ranks.

    Made by every rank of the group: its own ``stage``, or stages where its row of the schedule has several, the same
    ``graph``, ``schedule`` and ``options``, those of `PipelineOptions`, and of planning a reshard. Making one calls no
    other rank: an unknown option is refused at once, and what ranks were given differently with the first step, on all
    of them.
    """

    def __init__(
        self,
        stage: Stage | Sequence[Stage],
        graph: StageGraph,
        schedule: Schedule,
        *,
        group: Group = None,
        **options: Unpack[PipelineOptions],
    ) -> None:
        self.stages = (stage,) if isinstance(stage, Stage) else tuple(sorted(stage, key=lambda one: one.index))
        self.graph = graph
        self.schedule = schedule
        self.group = group
        check_options("making a pipeline", options, PipelineOptions)
        self._shown_options = {name: _shown(value) for name, value in sorted(options.items())}
        """What this rank was given as options, as text."""
        transfers = options.pop("transfers", Transfers.ASYNC)
        self._payload = options.pop("payload", Payload.VALUES)
        self._host_of = options.pop("host_of", None)
        options.setdefault("sum_order", SumOrder.ANY)  # no process has an order for the gradients of many ranks
        self._options: PlanOptions = options
        self._places: Places | None = None
        """Of all stages; None until the ranks have met."""
        rows: dict[int, list[Action]] = {}
        for action in schedule.actions():
            rows.setdefault(action.stage, []).append(action)
        mine = {one.index: one for one in self.stages}
        device = device_of(self.stages[0].module)
        self._part = StepPart(
            stages=mine,
            graph=graph,
            rows=rows,
            row=[action for action in schedule.actions() if action.stage in mine],
            num_microbatches=schedule.num_microbatches,
            group=group,
            device=device,
            is_blocking=transfers is Transfers.BLOCKING,
            side=SideStream(device),
            tied=TiedWeights(graph, mine, schedule.row_of, group, self._tied_options()),
        )
        self._opened: dict[str, Opened] = {}
        """By the shapes of the batch."""

    def step(self, batch: Entries | None = None, target: Entry | Entries | None = None) -> StepReport:
        """Add the gradients of one batch to ``.grad`` of the stage's parameters; what happened.

        Called by every rank of the group. ``batch`` has what this rank's module takes beside values of other stages:
        tensors that are cut into micro-batches along their first dim, or sequences of micro-batches. ``target`` goes to
        the loss, on the last stage: one such tensor, or a dict of several, which the loss gets as a dict. The loss is
        the mean over micro-batches. `PipelineError` on all ranks, before anything is computed, when micro-batches
        differ in shape; `PeerError` when a rank dies.
        """
        return self._run(self._meet, batch, target)

    @torch.no_grad()
    def evaluate(self, batch: Entries | None = None, target: Entry | Entries | None = None) -> StepReport:
        """Run the forwards of one batch alone, without gradients; the report has what the last stage returned, and its
        losses where there is a target, or the module returns the loss.

        Called by every rank of the group, with what a step takes. The mode of the modules is the caller's.
        """
        return self._run(lambda: self._meet().forwards(), batch, target)

    def _meet(self) -> StepPart:
        """This rank's part, once the ranks have met."""
        if self._places is None:
            self._places = gather_places(self.stages, self.graph, self._describe, self.group)
            if is_queued(self.group):
                queues = plan_queues(self.schedule, self.graph)
                self._part = replace(self._part, queue=queues[self.schedule.row_of[self.stages[0].index]])
        return self._part

    def _run(self, meet: Callable[[], StepPart], batch: Entries | None, target: Any) -> StepReport:
        part = meet()
        assert self._places is not None
        entries, targets, told = self._exchange_shapes(part, batch, target)
        run = StepRun(part, entries, targets)
        key = json.dumps([part.has_backward, told])
        opened = self._opened.get(key)
        if opened is not None:
            run.add_routes(opened.routes)
        else:
            opened = StepOpening(run, self.graph, self._places, self.group).run(part.stages, self._plan_route)
            self._opened[key] = opened
        share, rank = 1.0, group_rank(self.group)
        if self.graph.num_stages - 1 in part.stages:
            share = share_of_loss(self._places.meshes[-1], told, opened.taken, rank)
        return run.run(share, opened.rules)

    def edge_bytes(self, edge: Edge) -> tuple[int, int]:
        """What a micro-batch puts on the busiest NIC for an edge: its value, and its gradient.

        For the last batch of new shapes.
        """
        opened = next(reversed(self._opened.values()), None)
        for route in opened.routes if opened is not None else ():
            if (route.source, route.target) == (edge.source, edge.target):
                return route.forward.busiest_bytes(edge.name), (
                    0 if route.backward is None else route.backward.busiest_bytes(edge.name)
                )
        raise PipelineError(f"looking up the values of {edge}: no step has run yet; run one")

    def _exchange_shapes(
        self, part: StepPart, batch: Entries | None, target: Any
    ) -> tuple[list[dict[str, torch.Tensor]], list[Any], list[Any]]:
        """This rank's micro-batches and targets, and their shapes on all ranks."""
        rank = group_rank(self.group)
        entries: list[dict[str, torch.Tensor]] = []
        targets: list[Any] = []
        num = self.schedule.num_microbatches

        def tell() -> list[Any]:
            if part.has_backward and not torch.is_grad_enabled():
                mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
                raise PipelineError(
                    f"{DOING}: rank {rank} is in torch.{mode}, expected gradients on, which a step computes; call it "
                    "outside"
                )
            last = self._part.stages.get(self.graph.num_stages - 1)
            if target is not None and (last is None or last.loss is None):
                raise PipelineError(
                    f"{DOING}: rank {rank} was given a target, but stage {self.stages[-1].index} has no loss; give "
                    "it to the last stage, with a loss that takes it"
                )
            if batch is not None and not isinstance(batch, Mapping):
                raise PipelineError(
                    f"{DOING}: the batch of rank {rank} is of type {type(batch).__name__}, expected "
                    "tensors by the names under which the module takes them; give a dict"
                )
            entries.extend(cut_microbatches(batch or {}, num, "the batch's"))
            if isinstance(target, Mapping):
                named = cut_microbatches(target, num, "the target's")
                targets.extend(named)
            else:
                named = cut_microbatches({} if target is None else {"target": target}, num, "the")
                targets.extend(each.get("target") for each in named)
            return [
                [[name, dtype_name(one.dtype), list(one.shape)] for name, one in sorted(each.items())]
                for each in (entries[0], named[0])
            ]

        return entries, targets, gather_from(tell, self.group, DOING)

    def _plan_route(
        self, ends: tuple[int, int], made: Mapping[str, EdgeEnd], taken: Mapping[str, EdgeEnd]
    ) -> StageRoute:
        assert self._places is not None
        return plan_route(ends, made, taken, self._host_of or self._places.host_of, self._payload, self._options)

    def _tied_options(self) -> PlanOptions:
        return self._options if self._host_of is None else {**self._options, "host_of": self._host_of}

    def _describe(self) -> str:
        """What all ranks must have been given alike, as text; raises what is wrong with it."""
        graph, schedule = self.graph, self.schedule
        if is_queued(self.group):
            check_device(self._part.device, group_device(self.group))
        check_schedule(schedule, graph)
        for tie in graph.ties:
            self._part.tied.parameters_of(tie)
        mine = [stage.index for stage in self.stages]
        for row in schedule.rows:
            of_row = sorted({action.stage for action in row})
            if {*of_row} & {*mine} and of_row != mine and max(mine) < graph.num_stages:
                raise PipelineError(
                    f"making a pipeline: rank {group_rank(self.group)} has stages {mine}, the schedule "
                    f"{schedule.name!r} has a row of stages {of_row}, expected one rank to have all stages of a row; "
                    "give it these"
                )
        rows = " | ".join(" ".join(map(str, row)) for row in schedule.rows)
        digest = hashlib.sha256(f"{graph} {rows}".encode()).hexdigest()[:16]
        return (
            f"schedule {schedule.name!r} of {schedule.num_stages} stages and {schedule.num_microbatches} micro-batches "
            f"over {len(graph.edges)} edges ({digest}) with options {self._shown_options}"
        )


def check_device(device: torch.device, of_group: torch.device) -> None:
    """`PipelineError` for a stage on another GPU than the one over which its group talks."""
    if device.type == of_group.type and device != of_group:
        raise PipelineError(
            f"{DOING}: the module of this rank's stage is on {device}, its group over NCCL talks from {of_group}, "
            "expected one device; call torch.cuda.set_device before making the group, or give the group device_id"
        )


def _shown(value: Any) -> str:
    text = str(sorted(value.items()) if isinstance(value, Mapping) else value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"...{hashlib.sha256(text.encode()).hexdigest()[:16]}"
