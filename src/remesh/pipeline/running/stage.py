"""Stage of a pipeline at work on micro-batches on one rank, without any communication.

Definitions. A *value* is a tensor that goes from stage to stage, known by name. A stage *takes* values by keyword and
*makes* others. On a mesh of several ranks each rank has its own part of a value, cut by its sharding spec; the
module sees the rank's own part, as a plain tensor. The *stash* of a micro-batch is what its backward needs: inputs,
outputs and the graph between them, kept from the forward until the gradients of the weights are there.

Memory. What a stage takes is its own, and it may write there, unless another stage would have to see that. What it
makes stays the module's, which may write there again while the value is on its way: so what leaves is a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.running.backward import (
    Rest,
    Roots,
    begin_graph,
    run_backward,
    run_input_backward,
    run_weight_backward,
)

LOSS = "loss"
"""Name of what the last stage's backward begins with."""

Cut = str | Sequence[Placement]
"""How a value lies on a stage's mesh: a sharding spec such as ``"S0R"``, or DTensor placements."""
Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Stage:
    """One rank's part of a pipeline: which stage it works for, and with what."""

    index: int
    """Number of the stage in the graph. Invariant: >= 0."""
    module: nn.Module
    """Called with the values that the stage takes, and the entries of the batch, by keyword; returns a dict of the
    values that the stage makes, or the tensor itself where it makes one."""
    mesh: DeviceMesh | None = None
    """The ranks of the stage; None when this rank is all of it."""
    takes: Mapping[str, Cut] = field(default_factory=dict)
    """How values that come lie on the mesh; those that are not named are whole on every rank."""
    makes: Mapping[str, Cut] = field(default_factory=dict)
    """How values that leave lie on the mesh; those that are not named are whole on every rank. A DTensor says it itself
    for the axes of its own mesh."""
    loss: Callable[..., torch.Tensor] | None = None
    """On the last stage: called with what the module returns and the micro-batch's target, if there is one, or the dict
    of its targets; a mean over the micro-batch. None when the module returns the loss itself."""
    data_axes: tuple[str, ...] = ()
    """Axes of the mesh along which ranks have the same weights and other samples: their gradients are averaged, those
    that FSDP has by itself. Every value of the stage is then named in ``takes`` or ``makes``."""
    entries: Collection[str] | None = None
    """Names of the batch's entries that the module takes; all of the rank's by default."""

    def __post_init__(self) -> None:
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        unknown = [axis for axis in self.data_axes if axis not in names]
        if self.index < 0 or unknown:
            raise PipelineError(
                f"describing stage {self.index}: expected an index >= 0 and data axes among the mesh's {tuple(names)}, "
                f"found {self.data_axes}; name the axes of the mesh with mesh_dim_names"
            )

    @property
    def width(self) -> int:
        """Number of its data-parallel ranks."""
        return math.prod(self.mesh[axis].size() for axis in self.data_axes) if self.mesh is not None else 1


def cut_microbatches(batch: Mapping[str, Any], num_microbatches: int, what: str) -> list[dict[str, torch.Tensor]]:
    """The entries of each micro-batch, all of the same shapes.

    A tensor is cut along its first dim, a sequence has one tensor for each micro-batch. `PipelineError` when the parts
    would differ.
    """
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(num_microbatches)]
    for name, entry in batch.items():
        if isinstance(entry, torch.Tensor):
            num_samples = entry.shape[0] if entry.ndim else 0
            if num_samples < num_microbatches or num_samples % num_microbatches:
                raise PipelineError(
                    f"cutting {what} {name!r} into micro-batches: it has {num_samples} samples, expected a multiple of "
                    f"{num_microbatches}, so that all micro-batches have one shape; change the batch or the schedule"
                )
            pieces: Sequence[torch.Tensor] = entry.chunk(num_microbatches)
        else:
            pieces = entry
            if len(pieces) != num_microbatches:
                raise PipelineError(
                    f"reading {what} {name!r}: it has {len(pieces)} micro-batches, the schedule {num_microbatches}; "
                    "give one tensor for each"
                )
        for number, piece in enumerate(pieces):
            if piece.shape != pieces[0].shape or piece.dtype != pieces[0].dtype:
                raise PipelineError(
                    f"reading {what} {name!r}: micro-batch {number} is {piece.dtype} of shape {tuple(piece.shape)}, "
                    f"micro-batch 0 is {pieces[0].dtype} of {tuple(pieces[0].shape)}; expected all of one shape and "
                    "dtype: pad them"
                )
            parts[number][name] = piece
    return parts


@dataclass(slots=True)
class _Stash:
    """What the backward of one micro-batch needs."""

    inputs: dict[str, torch.Tensor]
    """Leaves that get the gradients of the values that came."""
    outputs: dict[str, torch.Tensor]
    """Values that left and have gradients; on the last stage the loss."""
    rest: Rest | None = None
    """Once the first part of the backward is done."""


@dataclass(slots=True)
class StageRules:
    """What holds for all micro-batches of a stage once the first has shown it."""

    seen_by_others: Collection[str] = ()
    """Values that come, in whose memory the module must not write: another stage would have to see it."""
    placements: dict[str, Any] = field(default_factory=dict)
    """Of each value that leaves, where it is a DTensor; empty before the first."""


class StageWork:
    """A stage at work on the micro-batches of one step."""

    def __init__(self, stage: Stage, makes: Sequence[str], num_microbatches: int) -> None:
        self._stage = stage
        self._makes = tuple(makes)
        """Names of the values that leave; empty on the last stage."""
        self._num_microbatches = num_microbatches
        self._is_fsdp = any(isinstance(each, FSDPModule) for each in stage.module.modules())
        self._stashes: dict[int, _Stash] = {}
        self.losses: dict[int, torch.Tensor] = {}
        """On the last stage: of each micro-batch."""
        self.outputs: dict[int, Any] = {}
        """On the last stage, without gradients: what the module returned."""
        self.share = 1.0
        """On the last stage: what this rank's loss counts beside those of other data-parallel ranks; 1 on average."""
        self.rules = StageRules()

    @property
    def num_stashes(self) -> int:
        """Micro-batches that are kept for their backward now."""
        return len(self._stashes)

    def run_forward(self, microbatch: int, taken: Values, entries: Values, target: Any) -> Values:
        """F: the values that leave, as the module made them, for `leaving_copy`.

        ``taken`` are fresh tensors of this micro-batch alone.
        """
        inputs, begun = begin_graph(taken)
        versions = {name: begun[name]._version for name in self.rules.seen_by_others}
        returned = self._stage.module(**begun, **entries)
        if not self._makes and not torch.is_grad_enabled():
            self.outputs[microbatch] = returned
            if self._stage.loss is not None and target is None:
                return {}
        made = name_made(self._stage, self._makes, returned, target)
        self._check_rules([name for name, version in versions.items() if begun[name]._version != version], made)
        local = {name: local_of(value) for name, value in made.items()}
        if not self._makes:
            self.losses[microbatch] = local[LOSS].detach()
            local[LOSS] = local[LOSS] / self._num_microbatches
        if torch.is_grad_enabled():
            outputs = {name: value for name, value in local.items() if value.requires_grad}
            self._stashes[microbatch] = _Stash(inputs, outputs)
        return {name: value for name, value in made.items() if name != LOSS}

    def _check_rules(self, written: Sequence[str], made: Values) -> None:
        doing = f"running stage {self._stage.index}"
        if written:
            raise PipelineError(
                f"{doing}: its module has written into {written[0]!r}, expected it left as it came, because a later "
                "stage uses the same memory and would not see it; write into a clone, or split elsewhere"
            )
        placements = {name: getattr(value, "placements", None) for name, value in made.items()}
        known = self.rules.placements or placements
        for name, found in placements.items():
            if found != known[name]:
                raise PipelineError(
                    f"{doing}: it made {name!r} with placements {found}, expected {known[name]} as before (None for a "
                    "plain tensor); return it alike for all micro-batches"
                )
        self.rules.placements = placements

    def run_backward(self, microbatch: int, gradients: Values) -> dict[str, torch.Tensor]:
        """B: the gradients of the values that came, by name. ``gradients`` are those of the values that left."""
        stash = self._stashes.pop(microbatch)
        found = run_backward(self._roots(stash, gradients), list(stash.inputs.values()))
        return _filled(stash.inputs, found)

    def run_input_backward(self, microbatch: int, gradients: Values) -> dict[str, torch.Tensor]:
        """I: as B, but the weights' gradients are left to W. FSDP sums gradients when those of the inputs are there, so
        there they are left for nothing."""
        stash = self._stashes[microbatch]
        roots, leaves = self._roots(stash, gradients), list(stash.inputs.values())
        if self._is_fsdp:
            found, stash.rest = run_backward(roots, leaves), Rest([])
        else:
            found, stash.rest = run_input_backward(roots, leaves)
        inputs, stash.inputs, stash.outputs = stash.inputs, {}, {}
        return _filled(inputs, found)

    def run_weight_backward(self, microbatch: int) -> None:
        """W: add the gradients of the weights."""
        rest = self._stashes.pop(microbatch).rest
        assert rest is not None  # the schedule was checked: I comes before W
        run_weight_backward(rest)

    def _roots(self, stash: _Stash, gradients: Values) -> Roots:
        outputs = stash.outputs
        if LOSS in outputs and not self._makes:
            return Roots([outputs[LOSS]], [torch.full_like(outputs[LOSS], self.share)])
        # A value may leave for several stages, or for none that sent a gradient back.
        named = [name for name in outputs if name in gradients]
        return Roots([outputs[name] for name in named], [gradients[name] for name in named])


def name_made(stage: Stage, makes: Sequence[str], made: Any, target: Any) -> dict[str, torch.Tensor]:
    """What the module of a stage has returned, by name: the values in ``makes``, or the loss where that is empty."""
    if not makes:
        if stage.loss is not None:
            made = stage.loss(made) if target is None else stage.loss(made, target)
        made = {LOSS: made}
    elif isinstance(made, torch.Tensor) and len(makes) == 1:
        made = {makes[0]: made}
    doing = f"running stage {stage.index}"
    if not isinstance(made, Mapping) or any(name not in made for name in makes):
        found = sorted(map(str, made)) if isinstance(made, Mapping) else type(made).__name__
        raise PipelineError(f"{doing}: expected a dict with {sorted(makes)} from its module, found {found}; return it")
    for name in makes or (LOSS,):
        if not isinstance(made[name], torch.Tensor):
            raise PipelineError(
                f"{doing}: it made {name!r} of type {type(made[name]).__name__}, expected a tensor; give every tensor "
                "that leaves a name of its own"
            )
    if not makes:
        return {LOSS: _whole_loss(stage, made[LOSS])}
    return {name: made[name] for name in makes}


def _whole_loss(stage: Stage, loss: torch.Tensor) -> torch.Tensor:
    """The loss of this rank's samples, as one number."""
    doing = f"running stage {stage.index}"
    if loss.numel() != 1:
        raise PipelineError(
            f"{doing}: its loss has shape {tuple(loss.shape)}, expected one number; give the last stage a loss"
        )
    if not isinstance(loss, DTensor):
        return loss
    lines = lines_of(loss.device_mesh)
    data_meshes = [stage.mesh[axis] for axis in stage.data_axes] if stage.mesh is not None else []
    over_samples = any(mesh.size() > 1 and lines_of(mesh)[0] in lines for mesh in data_meshes)
    if over_samples or not all(isinstance(one, (Replicate, Partial)) for one in loss.placements):
        raise PipelineError(
            f"{doing}: its loss is a DTensor with {loss.placements} on {loss.device_mesh}, expected the loss of this "
            f"rank's own samples, whole or a partial sum over other axes than {stage.data_axes}; return its local "
            "tensor, or that of the data axes"
        )
    return loss.full_tensor()


def add_gradients(parts: Iterable[Values]) -> dict[str, torch.Tensor]:
    """The gradients of values that left for several stages, added in the order of ``parts``."""
    total: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, gradient in part.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def lines_of(mesh: DeviceMesh) -> list[list[int]]:
    """The ranks along each axis of a mesh through this rank."""
    here = mesh.get_coordinate()
    assert here is not None
    lines = []
    for axis in range(mesh.ndim):
        at: list[Any] = [*here]
        at[axis] = slice(None)
        lines.append([int(rank) for rank in mesh.mesh[tuple(at)]])
    return lines


def local_of(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a value. Every addend of a partial sum has the gradient of the whole."""
    if not isinstance(value, DTensor):
        return value
    return value.to_local(grad_placements=[Replicate() if one.is_partial() else one for one in value.placements])


def leaving_copy(value: torch.Tensor) -> torch.Tensor:
    """What is sent of a value."""
    return local_of(value.detach()).clone(memory_format=torch.contiguous_format)


def _filled(inputs: Values, found: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Gradients by name; zeros for inputs that nothing depends on, because a stage before waits for them."""
    return {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(inputs.items(), found, strict=True)
    }
