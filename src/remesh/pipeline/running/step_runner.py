"""Step of a pipeline on one rank: its row of the schedule, of one stage or several, while lanes carry values.

0. A step with new shapes is opened: the first micro-batch has its forward (`remesh.pipeline.running.opening`).
1. Before each action it takes the values that this needs from the lanes; after it hands on what came out. It never
   waits for a transfer that it does not need. Over NCCL alone it goes through its queue, which has the crossings of
   values between the actions (`remesh.pipeline.queues`).
2. It waits until its lanes are empty, averages gradients over the data axes of its stage, and sums those of tied
   weights (`remesh.pipeline.running.tied`).

A rank that dies breaks its connections. A rank that notices breaks off its own, so that all ranks raise `PeerError`
soon, none after the group's timeout; over NCCL they learn of it by that timeout. The same happens when the module of a
rank raises: its own error there, `PeerError` elsewhere. Gradients are then undefined.

Times are those of the device: an action of a device begins and ends after its host has gone on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from remesh.comm.gather import Group, break_off, check_end, find_given_up, peer_error
from remesh.device.streams import DeviceClock, SideStream
from remesh.foundation.errors import Error, PeerError
from remesh.groups.blame import is_network_error
from remesh.pipeline.actions import Action, ActionKind
from remesh.pipeline.edge_values import Pass
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.queues import Crossing, Queue
from remesh.pipeline.running.edges import Lane, LaneEnd, Passage, StageRoute
from remesh.pipeline.running.queued_edges import QueuedLane
from remesh.pipeline.running.stage import Stage, StageRules, StageWork, Values, add_gradients, leaving_copy
from remesh.pipeline.running.tied import TiedWeights
from remesh.pipeline.running.values import Described, StageMesh, describe_made

DOING = "running a pipeline step"
Item = TypeVar("Item", Action, Action | Crossing)
_BACKWARD_MADE = (ActionKind.I, ActionKind.B)


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
    outputs: tuple[Any, ...]
    """Of an evaluation: what the last stage's module returned for each micro-batch; empty elsewhere."""
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


@dataclass(frozen=True)
class StepPart:
    """A rank's part in every step."""

    stages: Mapping[int, Stage]
    """Those of this rank, by number."""
    graph: StageGraph
    rows: Mapping[int, Sequence[Action]]
    """What each stage does, in order."""
    row: Sequence[Action]
    """What this rank does."""
    num_microbatches: int
    group: Group
    device: torch.device
    """Of the stages' modules."""
    is_blocking: bool
    """Whether the rank blocks until what it gives has left."""
    side: SideStream
    """Of the device, for what crosses while the stage computes."""
    tied: TiedWeights
    queue: Queue | None = None
    """What the rank does over NCCL alone, in order; None where lanes have threads."""

    def forwards(self) -> StepPart:
        """The same part of an evaluation, which has no other actions."""
        return replace(
            self,
            rows={stage: _forwards_of(actions) for stage, actions in self.rows.items()},
            row=_forwards_of(self.row),
            queue=None if self.queue is None else tuple(_forwards_of(self.queue)),
        )

    @property
    def has_backward(self) -> bool:
        """Whether it computes gradients."""
        return any(action.kind is not ActionKind.F for action in self.row)

    def break_off(self) -> None:
        """Close this rank's connections: those of the pipeline, and those within its stage."""
        break_off(self.group)
        for mesh in (stage.mesh for stage in self.stages.values()):
            for group in mesh.get_all_groups() if mesh is not None and mesh.size() > 1 else ():
                break_off(group)

    @cached_property
    def first_microbatch(self) -> int:
        """The one that a step with new shapes is opened with."""
        return next(one.microbatch for one in self.rows[0] if one.kind is ActionKind.F)


def _forwards_of(items: Iterable[Item]) -> list[Item]:
    return [
        item
        for item in items
        if (item.way is Pass.FORWARD if isinstance(item, Crossing) else item.kind is ActionKind.F)
    ]


AnyLane = Lane | QueuedLane


@dataclass(frozen=True, slots=True)
class _First:
    """The forward with which the step was opened."""

    made: Values
    """What leaves."""
    span: tuple[Any, Any]
    """The clock at both ends."""


@dataclass(slots=True)
class _AtWork:
    """A stage of this rank in the step."""

    stage: Stage
    work: StageWork
    into: list[AnyLane] = field(default_factory=list)
    """Bring values that the stage takes."""
    out_of: list[AnyLane] = field(default_factory=list)
    """Carry values that the stage makes, away."""
    back_into: list[AnyLane] = field(default_factory=list)
    """Bring gradients of what the stage made."""
    back_out_of: list[AnyLane] = field(default_factory=list)
    """Carry gradients of what the stage took, away."""
    first: _First | None = None
    """Of a step that was opened."""


class StepRun:
    """One step under way on one rank."""

    def __init__(self, part: StepPart, entries: Sequence[Values], targets: Sequence[Any]) -> None:
        self._part = part
        self._entries = entries
        self._targets = targets
        self._started_s = time.monotonic()
        self._clock = DeviceClock(part.device)
        self._num_routes = 0
        self._lanes: dict[str, AnyLane] = {}
        self._queued: dict[tuple[int, int, Pass], QueuedLane] = {}
        """The same by giver, taker and pass, where they are queued."""
        self._at = {
            index: _AtWork(stage, StageWork(stage, part.graph.names_made(index), part.num_microbatches))
            for index, stage in part.stages.items()
        }
        self._peak_stashes = 0
        self._spans: list[tuple[Action, Any, Any]] = []
        """Each action that was done, and the clock at both ends."""

    def add_routes(self, routes: Iterable[StageRoute]) -> None:
        """Make the lanes of routes; all ranks add all routes, in one order."""
        for number, route in enumerate(routes, self._num_routes):
            self._num_routes += 1
            ends = [self._at.get(index) for index in (route.source, route.target)]
            if ends == [None, None]:
                continue
            ways = [(Pass.FORWARD, "out_of", "into"), (Pass.BACKWARD, "back_into", "back_out_of")]
            for way, *lists in ways if route.backward is not None and self._part.has_backward else ways[:1]:
                lane = self._lane(2 * number + way, route, way)
                for end, name in zip(ends, lists, strict=True):
                    if end is not None:
                        getattr(end, name).append(lane)

    def cross_first(self, routes: Iterable[StageRoute]) -> None:
        """Carry the values of the first micro-batch over these routes, which were added last."""
        number = self._part.first_microbatch
        with self._breaking_off():
            for route in routes:
                lane = self._lanes.get(f"{route.source}->{route.target} {ActionKind.F}")
                if lane is None:
                    continue
                source = self._at.get(route.source)
                if source is not None and source.first is not None:
                    lane.give(number, source.first.made)
                lane.cross(number)
                if isinstance(lane, QueuedLane):  # what has not come is not computed with
                    self._part.side.wait(self._part.side.mark())
                    check_end(self._part.group, DOING)

    def run_first(self, index: int, mesh: StageMesh, rules: StageRules) -> dict[str, Described]:
        """The forward of a stage for the first micro-batch; what it made."""
        here = self._at[index]
        here.work.rules = rules
        begun, made = self._forward(here, self._part.first_microbatch)
        here.first = _First(_leaving(made), (begun, self._clock.mark()))
        return describe_made(here.stage, made, mesh)

    def _forward(self, here: _AtWork, number: int) -> tuple[Any, Values]:
        """When the values were there, and what the stage has made of them."""
        taken = {name: one for lane in here.into for name, one in lane.take(number).items()}
        begun = self._clock.mark()
        names = here.stage.entries
        entries = {name: one for name, one in self._entries[number].items() if names is None or name in names}
        made = here.work.run_forward(number, taken, entries, self._targets[number])
        self._peak_stashes = max(self._peak_stashes, sum(each.work.num_stashes for each in self._at.values()))
        return begun, made

    def _lane(self, number: int, route: StageRoute, way: Pass) -> AnyLane:
        part = self._part
        is_forward = way is Pass.FORWARD
        planned = route.forward if is_forward else route.backward
        assert planned is not None
        giver, taker = (route.source, route.target) if is_forward else (route.target, route.source)
        end = LaneEnd(planned, part.group, part.device)
        name = f"{route.source}->{route.target} {ActionKind.F if is_forward else ActionKind.B}"
        if part.queue is not None and not (end.gives and end.takes):
            self._lanes[name] = self._queued[giver, taker, way] = QueuedLane(end, part.side, self._clock)
            return self._lanes[name]
        kinds = (ActionKind.F,) if is_forward else _BACKWARD_MADE
        made = [one.microbatch for one in part.rows[giver] if one.kind in kinds]
        self._lanes[name] = Lane(number, end, made, part.break_off)
        return self._lanes[name]

    def run(self, share: float, rules: Mapping[int, StageRules]) -> StepReport:
        """The whole step, or what is left of it where it was opened; ``share`` is that of this rank's loss."""
        for index, here in self._at.items():
            here.work.share, here.work.rules = share, rules[index]
        threaded = self._threaded()
        with self._breaking_off():
            before = self._part.tied.set_aside() if self._part.has_backward else ()
            for lane in threaded:
                lane.start()
            for item in self._part.row if self._part.queue is None else self._part.queue:
                if isinstance(item, Crossing):
                    self._cross(item)
                else:
                    self._run_action(item)
            for lane in threaded:
                lane.finish()
            self._part.side.wait(self._part.side.mark())
            check_end(self._part.group, DOING)
            if self._part.has_backward:
                for stage in self._part.stages.values():
                    _average_gradients(stage)
                self._part.tied.add_up(before)
        return self._report()

    def _threaded(self) -> list[Lane]:
        return [lane for lane in self._lanes.values() if isinstance(lane, Lane)]

    @contextmanager
    def _breaking_off(self) -> Iterator[None]:
        """Break off where this rank cannot go on, so that no other waits for it."""
        try:
            yield
        except BaseException as raised:
            # Once this rank breaks off, its lanes end with errors of their own.
            lost = self._lost_peer(self._threaded())
            self._part.break_off()
            for lane in self._threaded():
                lane.abort()
            told = self._tell(raised, lost)
            if told is raised:
                raise
            raise told from raised

    def _report(self) -> StepReport:
        found = {number: loss for here in self._at.values() for number, loss in here.work.losses.items()}
        losses = tuple(found[number] for number in sorted(found))
        outputs = {number: one for here in self._at.values() for number, one in here.work.outputs.items()}
        ended = self._clock.mark()
        seconds_of = self._clock.seconds
        return StepReport(
            loss=torch.stack(losses).mean() if losses else None,
            losses=losses,
            outputs=tuple(outputs[number] for number in sorted(outputs)),
            peak_stashes=self._peak_stashes,
            started_s=self._started_s,
            seconds=seconds_of(ended),
            spans=tuple(ActionSpan(action, seconds_of(begun), seconds_of(end)) for action, begun, end in self._spans),
            passages={name: lane.passages(self._started_s) for name, lane in self._lanes.items()},
        )

    def _cross(self, crossing: Crossing) -> None:
        lane = self._queued.get((crossing.giver, crossing.taker, crossing.way))
        if lane is None:  # of values without a gradient nothing goes back
            return
        if crossing.way is Pass.FORWARD and crossing.microbatch in lane.crossed:  # when the step was opened
            return
        lane.cross(crossing.microbatch)
        if self._part.is_blocking:
            lane.hold_up()

    def _run_action(self, action: Action) -> None:
        number, here = action.microbatch, self._at[action.stage]
        kind = action.kind
        given: Sequence[AnyLane] = ()
        if kind is ActionKind.F and here.first is not None and number == self._part.first_microbatch:
            self._spans.append((action, *here.first.span))
            return
        if kind is ActionKind.F:
            begun, made = self._forward(here, number)
            given, leaving = here.out_of, _leaving(made)
        elif kind is ActionKind.W:
            begun = self._clock.mark()
            here.work.run_weight_backward(number)
        else:
            # From the last stage to the first: so does one process come by them.
            gradients = add_gradients(lane.take(number) for lane in here.back_into[::-1])
            begun = self._clock.mark()
            run = here.work.run_backward if kind is ActionKind.B else here.work.run_input_backward
            given, leaving = here.back_out_of, run(number, gradients)
        for lane in given:
            lane.give(number, leaving)
        self._spans.append((action, begun, self._clock.mark()))
        self._settle(given, number)

    def _settle(self, given: Sequence[AnyLane], number: int) -> None:
        """In a pipeline that does not overlap: wait until what was given has left."""
        for lane in given if self._part.is_blocking else ():
            if isinstance(lane, Lane):  # one that is queued holds up the device, behind its crossing
                lane.wait_gone(number)

    def _lost_peer(self, threaded: Sequence[Lane]) -> PeerError | None:
        """The loss of a peer, as lanes or the group report it."""
        if self._part.queue is not None:
            return find_given_up(self._part.group, DOING)
        return next((lane.error for lane in threaded if isinstance(lane.error, PeerError)), None)

    def _tell(self, raised: BaseException, lost: PeerError | None) -> BaseException:
        """The error to raise here: a lost peer shows as errors of many kinds, and of any kind where a stage has
        computed with values that never came."""
        may_be_lost = RuntimeError if self._part.queue is None else Exception
        if isinstance(raised, Error) or not isinstance(raised, may_be_lost):
            return raised
        if lost is None and is_network_error(raised):
            lost = peer_error(DOING, self._part.group, raised)
        return lost or raised


def _leaving(made: Values) -> dict[str, torch.Tensor]:
    return {name: leaving_copy(value) for name, value in made.items()}


def _average_gradients(stage: Stage) -> None:
    """Make the gradients of ranks with other samples one, over each data axis; one sum for each dtype. FSDP has done so
    with its own."""
    if stage.mesh is None:
        return
    by_fsdp = {
        parameter
        for module in stage.module.modules()
        if isinstance(module, FSDPModule)
        for parameter in module.parameters()
        if isinstance(parameter, DTensor)
    }
    for axis in stage.data_axes:
        size = dist.get_world_size(stage.mesh.get_group(axis))
        if size == 1:
            continue
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in stage.module.parameters():
            if parameter.requires_grad and parameter not in by_fsdp:
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
        check_end(stage.mesh.get_group(axis), DOING)
