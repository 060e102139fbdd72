"""How does a pipeline train a step? Every rank goes through its row of the schedule; lanes carry values meanwhile.

One step on one rank, in order:

0. Before the first one all ranks meet: each tells its stage, its host, and a digest of all that must be alike.
1. All ranks tell each other the shapes of their batch, in one small gather. Known shapes have their plans already; for
   new ones all survey their values and plan the routes. What is wrong is raised here, on all ranks alike.
2. The rank does the compute actions of its row. Before each it takes the values that this needs from the lanes; after
   it hands on what came out. It never waits for a transfer that it does not need.
3. It waits until its lanes are empty, and averages gradients over the data axes of its stage.

A rank that dies breaks its connections. Whoever notices breaks off its own, so that all ranks raise `PeerError` soon,
none after the group's timeout. The same happens when the module of a rank raises: its own error there, `PeerError`
elsewhere. Gradients are then undefined; meet again in a new group, and take the step again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from remesh.comm.blame import is_network_error
from remesh.comm.gather import Group, break_off, check_end, gather_from, group_rank, is_queued, peer_error
from remesh.errors import Error, PeerError
from remesh.layout.from_torch import dtype_name
from remesh.options import check_options
from remesh.pipeline.actions import Action, ActionKind
from remesh.pipeline.check import check_schedule
from remesh.pipeline.edges import Lane, LaneOwner, Passage, Payload, StageRoute, plan_route
from remesh.pipeline.graph import Edge, StageGraph
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.simulate import Transfers
from remesh.pipeline.stage import Stage, StageWork, Values, add_gradients, cut_microbatches
from remesh.pipeline.survey import Places, StageValues, device_of, names_made, survey_places, survey_values
from remesh.reshard.planning.transfer import PlanOptions

_DOING = "running a pipeline step"
RUNNABLE = (Transfers.ASYNC, Transfers.BLOCKING)
"""What a pipeline can do of the kinds of transfers; the others are models."""
_MOST_TOLD = 64
"""Characters of an option's value in an error; of a longer one its digest is told."""
_BACKWARD_MADE = (ActionKind.I, ActionKind.B)
Entries = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]


class PipelineOptions(PlanOptions, total=False):
    """The options of a pipeline besides its schedule."""

    transfers: Transfers
    """Beside the compute, as by default, or blocking: nobody computes while a send of its own is on its way. Takers
    take in what comes whatever they do, so every schedule that passes its check comes to its end either way."""
    payload: Payload
    """What crosses the links; the values by default."""


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """One action as it went."""

    action: Action
    start_s: float
    """When its values were there and it began; seconds since the step began on this rank."""
    end_s: float


@dataclass(frozen=True)
class StepReport:
    """One step of one rank."""

    loss: torch.Tensor | None
    """Mean over the micro-batches, on the ranks of the last stage; None elsewhere."""
    losses: tuple[torch.Tensor, ...]
    """Of each micro-batch, in order; empty elsewhere."""
    peak_stashes: int
    """Most micro-batches that this rank kept for their backward at once."""
    started_s: float
    """When the step began, on the machine's monotonic clock."""
    seconds: float
    """Until everything was computed and sent."""
    spans: tuple[ActionSpan, ...]
    """The actions of this rank's row, as they went."""
    passages: Mapping[str, tuple[Passage, ...]]
    """Of each lane of this rank, such as ``"0->1 F"``; times on the machine's monotonic clock."""


class Pipeline:
    """A model in stages that trains by a schedule; each stage has its own ranks.

    Made by every rank of the group: its own ``stage``, the same ``graph``, ``schedule`` and ``options``, those of
    `PipelineOptions`, and of planning a reshard. Making one talks to nobody: an option that nobody knows is refused at
    once, and what ranks were given differently with the first step, on all of them.
    """

    def __init__(
        self,
        stage: Stage,
        graph: StageGraph,
        schedule: Schedule,
        *,
        group: Group = None,
        **options: Unpack[PipelineOptions],
    ) -> None:
        self.stage = stage
        self.graph = graph
        self.schedule = schedule
        self.group = group
        check_options("making a pipeline", options, PipelineOptions)
        self._told = {name: _told_of(value) for name, value in sorted(options.items())}
        """What this rank was given as options, as text."""
        transfers = options.pop("transfers", Transfers.ASYNC)
        if transfers not in RUNNABLE:
            raise PipelineError(
                f"making a pipeline: transfers are {transfers}, which is a model of other runtimes, expected one of "
                f"{', '.join(RUNNABLE)}; simulate a schedule with it, or let this one run with another"
            )
        self._is_blocking = transfers is Transfers.BLOCKING
        self._payload = options.pop("payload", Payload.VALUES)
        self._host_of = options.pop("host_of", None)
        self._options: PlanOptions = options
        self._places: Places | None = None
        """Of all stages; None until the ranks have met."""
        rows: dict[int, list[Action]] = {}
        for action in schedule.actions():
            rows.setdefault(action.stage, []).append(action)
        self._rows = rows
        """What each stage does, in order."""
        self._device = device_of(stage.module)
        self._routes: dict[str, tuple[StageRoute, ...]] = {}
        """By the shapes of the batch."""

    def step(
        self, batch: Entries | None = None, target: torch.Tensor | Sequence[torch.Tensor] | None = None
    ) -> StepReport:
        """Add the gradients of one batch to ``.grad`` of the stage's parameters; what happened.

        Called by every rank of the group. ``batch`` has what this rank's module takes beside values of other stages:
        tensors that are cut into micro-batches along their first dim, or sequences of micro-batches; ``target`` goes
        to the loss, on the last stage. The loss is the mean over micro-batches. `PipelineError` on all ranks, before
        anything is computed, when micro-batches differ in shape; `PeerError` when a rank dies.
        """
        if self._places is None:
            self._places = survey_places(self.stage, self.graph, self._describe, self.group)
        entries, targets, routes = self._prepare(self._places, batch, target)
        return _StepRun(self, routes).run(entries, targets)

    def edge_bytes(self, edge: Edge) -> tuple[int, int]:
        """What a micro-batch puts on the busiest NIC for an edge: its value, and its gradient.

        For the last batch of new shapes.
        """
        routes = next(reversed(self._routes.values()), ())
        for route in routes:
            if (route.source, route.target) == (edge.source, edge.target):
                return route.forward.busiest_bytes(edge.name), (
                    0 if route.backward is None else route.backward.busiest_bytes(edge.name)
                )
        raise PipelineError(f"looking up the values of {edge}: no step has run yet; run one")

    def _prepare(
        self, places: Places, batch: Entries | None, target: Any
    ) -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor | None], tuple[StageRoute, ...]]:
        rank = group_rank(self.group)
        entries: list[dict[str, torch.Tensor]] = []
        targets: list[torch.Tensor | None] = []
        num = self.schedule.num_microbatches

        def tell() -> list[Any]:
            if target is not None and (self.stage.loss is None or names_made(self.graph, self.stage.index)):
                raise PipelineError(
                    f"{_DOING}: rank {rank} was given a target, but stage {self.stage.index} has no loss; give "
                    "it to the last stage, with a loss that takes it"
                )
            if batch is not None and not isinstance(batch, Mapping):
                raise PipelineError(
                    f"{_DOING}: the batch of rank {rank} is of type {type(batch).__name__}, expected "
                    "tensors by the names under which the module takes them; give a dict"
                )
            entries.extend(cut_microbatches(batch or {}, num, "the batch's"))
            if target is None:
                targets.extend([None] * num)
            else:
                targets.extend(part["target"] for part in cut_microbatches({"target": target}, num, "the"))
            told = {**entries[0], **({} if targets[0] is None else {"": targets[0]})}
            return [[name, dtype_name(one.dtype), list(one.shape)] for name, one in sorted(told.items())]

        key = json.dumps(gather_from(tell, self.group, _DOING))
        if key not in self._routes:
            values = survey_values(self.stage, self.graph, places, (entries[0], targets[0]), self.group)
            routes: list[StageRoute] = []

            def plan() -> list[str]:
                routes.extend(self._plan(values, self._host_of or places.host_of))
                return [way.transfer.digest for each in routes for way in (each.forward, each.backward) if way]

            digests = gather_from(plan, self.group, _DOING)
            other = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
            if other is not None:
                raise PipelineError(
                    f"{_DOING}: expected the same routes between stages on all {len(digests)} ranks, found others on "
                    f"rank {other} than on rank 0; give all ranks the same options"
                )
            self._routes[key] = tuple(routes)
        return entries, targets, self._routes[key]

    def _plan(self, values: Sequence[StageValues], host_of: Mapping[int, str]) -> list[StageRoute]:
        ends = sorted({(edge.source, edge.target) for edge in self.graph.edges})
        routes = []
        for source, target in ends:
            names = [edge.name for edge in self.graph.edges_into(target) if edge.source == source]
            made = {name: values[source].makes[name] for name in names}
            taken = {name: values[target].takes[name] for name in names}
            routes.append(plan_route((source, target), made, taken, host_of, self._payload, self._options))
        return routes

    def _describe(self) -> str:
        """What all ranks must have been given alike, as text; raises what is wrong with it."""
        graph, schedule = self.graph, self.schedule
        if is_queued(self.group):
            raise PipelineError(
                f"{_DOING}: its group talks over NCCL alone, where messages have no tags and go in one order, as those "
                "of several edges do not; expected a group that reaches the CPU as well, such as one made with "
                "init_process_group('cpu:gloo,cuda:nccl'), over which they go by way of the host"
            )
        check_schedule(schedule, graph)
        rows = " | ".join(" ".join(map(str, row)) for row in schedule.rows)
        digest = hashlib.sha256(f"{graph} {rows}".encode()).hexdigest()[:16]
        return (
            f"schedule {schedule.name!r} of {schedule.num_stages} stages and {schedule.num_microbatches} micro-batches "
            f"over {len(graph.edges)} edges ({digest}) with options {self._told}"
        )

    def _break_off(self) -> None:
        """Close this rank's connections: those of the pipeline, and those within its stage."""
        break_off(self.group)
        mesh = self.stage.mesh
        for group in mesh.get_all_groups() if mesh is not None and mesh.size() > 1 else ():
            break_off(group)


class _StepRun:
    """One step under way on one rank."""

    def __init__(self, pipeline: Pipeline, routes: Sequence[StageRoute]) -> None:
        self._pipeline = pipeline
        self._index = index = pipeline.stage.index
        self._row = pipeline._rows[index]
        member = LaneOwner(group_rank(pipeline.group), pipeline.group, pipeline._device)
        self._lanes: dict[str, Lane] = {}
        self._into: list[Lane] = []
        """Bring values that the stage takes."""
        self._out_of: list[Lane] = []
        """Carry values that the stage makes, away."""
        self._back_into: list[tuple[Lane, StageRoute]] = []
        """Bring gradients of what the stage made."""
        self._back_out_of: list[tuple[Lane, StageRoute]] = []
        """Carry gradients of what the stage took, away."""
        for number, route in enumerate(routes):
            if index not in (route.source, route.target):
                continue
            forward = self._lane(2 * number, route, ActionKind.F, member)
            (self._out_of if index == route.source else self._into).append(forward)
            if route.backward is not None:
                backward = self._lane(2 * number + 1, route, ActionKind.B, member)
                (self._back_into if index == route.source else self._back_out_of).append((backward, route))
        num = pipeline.schedule.num_microbatches
        self._work = StageWork(pipeline.stage, names_made(pipeline.graph, index), num)
        self._spans: list[ActionSpan] = []

    def _lane(self, number: int, route: StageRoute, kind: ActionKind, member: LaneOwner) -> Lane:
        is_forward = kind is ActionKind.F
        way = route.forward if is_forward else route.backward
        assert way is not None
        maker = self._pipeline._rows[route.source if is_forward else route.target]
        kinds = (ActionKind.F,) if is_forward else _BACKWARD_MADE
        order = [action.microbatch for action in maker if action.kind in kinds and action.microbatch is not None]
        lane = Lane(number, way, order, member, self._pipeline._break_off)
        self._lanes[f"{route.source}->{route.target} {kind}"] = lane
        return lane

    def run(self, entries: Sequence[Values], targets: Sequence[torch.Tensor | None]) -> StepReport:
        """The whole step."""
        started_s = time.monotonic()
        try:
            for lane in self._lanes.values():
                lane.start()
            for action in self._row:
                self._run_action(action, entries, targets, started_s)
            for lane in self._lanes.values():
                lane.finish()
            _average_gradients(self._pipeline.stage)
        except BaseException as raised:
            # Once this rank breaks off, its lanes end with errors of their own.
            lost = next((lane.error for lane in self._lanes.values() if isinstance(lane.error, PeerError)), None)
            self._pipeline._break_off()
            for lane in self._lanes.values():
                lane.abort()
            told = self._tell(raised, lost)
            if told is raised:
                raise
            raise told from raised
        losses = tuple(self._work.losses[number] for number in sorted(self._work.losses))
        return StepReport(
            loss=torch.stack(losses).mean() if losses else None,
            losses=losses,
            peak_stashes=self._work.peak_stashes,
            started_s=started_s,
            seconds=time.monotonic() - started_s,
            spans=tuple(self._spans),
            passages={name: tuple(lane.passages) for name, lane in self._lanes.items()},
        )

    def _run_action(
        self, action: Action, entries: Sequence[Values], targets: Sequence[torch.Tensor | None], started_s: float
    ) -> None:
        number = action.microbatch
        assert number is not None
        kind = action.kind
        taken, gradients = {}, {}
        if kind is ActionKind.F:
            taken = _join(self._bring(self._into, number))
        elif kind in _BACKWARD_MADE:
            # From the last stage to the first: so does one process come by them.
            gradients = add_gradients(self._bring([lane for lane, _ in reversed(self._back_into)], number))
        begun_s = time.monotonic()
        given: Sequence[Lane] = ()
        if kind is ActionKind.F:
            made = self._work.run_forward(number, taken, entries[number], targets[number])
            given = self._out_of
            for lane in given:
                lane.give(number, made)
        elif kind is ActionKind.W:
            self._work.run_weight_backward(number)
        else:
            run = self._work.run_backward if kind is ActionKind.B else self._work.run_input_backward
            found = run(number, gradients)
            given = [lane for lane, _ in self._back_out_of]
            for lane in given:
                lane.give(number, found)
        self._spans.append(ActionSpan(action, begun_s - started_s, time.monotonic() - started_s))
        self._settle(given, number)

    def _settle(self, given: Sequence[Lane], number: int) -> None:
        """In a pipeline that does not overlap: wait until what was given has left."""
        for lane in given if self._pipeline._is_blocking else ():
            lane.wait_gone(number)

    def _bring(self, lanes: Sequence[Lane], number: int) -> Iterator[dict[str, torch.Tensor]]:
        for lane in lanes:
            yield lane.take(number)

    def _tell(self, raised: BaseException, lost: PeerError | None) -> BaseException:
        """The error to raise here: a lost peer shows as errors of many kinds."""
        if isinstance(raised, Error) or not isinstance(raised, RuntimeError):
            return raised
        if lost is None and is_network_error(raised):
            lost = peer_error(_DOING, self._pipeline.group, raised)
        return lost or raised


def _told_of(value: Any) -> str:
    text = str(sorted(value.items()) if isinstance(value, Mapping) else value)
    return text if len(text) <= _MOST_TOLD else f"...{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _join(parts: Iterator[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    joined: dict[str, torch.Tensor] = {}
    for part in parts:
        joined |= part
    return joined


def _average_gradients(stage: Stage) -> None:
    """Make the gradients of ranks with other samples one, over each data axis; one sum for each dtype."""
    if stage.mesh is None:
        return
    for axis in stage.data_axes:
        size = dist.get_world_size(stage.mesh.get_group(axis))
        if size == 1:
            continue
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in stage.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradient = parameter.grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                by_dtype.setdefault(local.dtype, []).append(local)
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=stage.mesh.get_group(axis))
            flat /= size
            for gradient, part in zip(
                gradients, flat.split_with_sizes([each.numel() for each in gradients]), strict=True
            ):
                gradient.copy_(part.view_as(gradient))
        check_end(stage.mesh.get_group(axis), _DOING)
