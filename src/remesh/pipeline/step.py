"""What does a rank do in a step of a pipeline? It goes through its row of the schedule; lanes carry values meanwhile.

1. Before each action it takes the values that this needs from the lanes; after it hands on what came out. It never
   waits for a transfer that it does not need.
2. It waits until its lanes are empty, and averages gradients over the data axes of its stage.

A rank that dies breaks its connections. Whoever notices breaks off its own, so that all ranks raise `PeerError` soon,
none after the group's timeout. The same happens when the module of a rank raises: its own error there, `PeerError`
elsewhere. Gradients are then undefined.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from remesh.comm.blame import is_network_error
from remesh.comm.gather import Group, break_off, check_end, group_rank, peer_error
from remesh.errors import Error, PeerError
from remesh.pipeline.actions import Action, ActionKind
from remesh.pipeline.edges import Lane, LaneOwner, Passage, StageRoute
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.stage import Stage, StageWork, Values, add_gradients
from remesh.pipeline.survey import names_made

DOING = "running a pipeline step"
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

    stage: Stage
    graph: StageGraph
    rows: Mapping[int, Sequence[Action]]
    """What each stage does, in order."""
    num_microbatches: int
    group: Group
    device: torch.device
    """Of the stage's module."""
    is_blocking: bool
    """Whether the rank stands still until what it gives has left."""

    def break_off(self) -> None:
        """Close this rank's connections: those of the pipeline, and those within its stage."""
        break_off(self.group)
        mesh = self.stage.mesh
        for group in mesh.get_all_groups() if mesh is not None and mesh.size() > 1 else ():
            break_off(group)


class StepRun:
    """One step under way on one rank."""

    def __init__(self, part: StepPart, routes: Sequence[StageRoute]) -> None:
        self._part = part
        index = part.stage.index
        self._row = part.rows[index]
        member = LaneOwner(group_rank(part.group), part.group, part.device)
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
        self._work = StageWork(part.stage, names_made(part.graph, index), part.num_microbatches)
        self._spans: list[ActionSpan] = []

    def _lane(self, number: int, route: StageRoute, kind: ActionKind, member: LaneOwner) -> Lane:
        is_forward = kind is ActionKind.F
        way = route.forward if is_forward else route.backward
        assert way is not None
        maker = self._part.rows[route.source if is_forward else route.target]
        kinds = (ActionKind.F,) if is_forward else _BACKWARD_MADE
        order = [action.microbatch for action in maker if action.kind in kinds and action.microbatch is not None]
        lane = Lane(number, way, order, member, self._part.break_off)
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
            _average_gradients(self._part.stage)
        except BaseException as raised:
            # Once this rank breaks off, its lanes end with errors of their own.
            lost = next((lane.error for lane in self._lanes.values() if isinstance(lane.error, PeerError)), None)
            self._part.break_off()
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
        for lane in given if self._part.is_blocking else ():
            lane.wait_gone(number)

    def _bring(self, lanes: Sequence[Lane], number: int) -> Iterator[dict[str, torch.Tensor]]:
        for lane in lanes:
            yield lane.take(number)

    def _tell(self, raised: BaseException, lost: PeerError | None) -> BaseException:
        """The error to raise here: a lost peer shows as errors of many kinds."""
        if isinstance(raised, Error) or not isinstance(raised, RuntimeError):
            return raised
        if lost is None and is_network_error(raised):
            lost = peer_error(DOING, self._part.group, raised)
        return lost or raised


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
        check_end(stage.mesh.get_group(axis), DOING)
