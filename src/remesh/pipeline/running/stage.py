"""Stage of a pipeline at work on micro-batches on one rank, without any communication.

Definitions. A *value* is a tensor that goes from stage to stage, known by name. A stage *takes* values by keyword and
*makes* others. On a mesh of several ranks each rank has its own part of a value, cut by its sharding spec; the
module sees the rank's own part, as a plain tensor. The *stash* of a micro-batch is what its backward needs: inputs,
outputs and the graph between them, kept from the forward until the gradients of the weights are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

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
    """How values that leave lie on the mesh; those that are not named are whole on every rank."""
    loss: Callable[..., torch.Tensor] | None = None
    """On the last stage: called with what the module returns and the micro-batch's target, if there is one; a mean over
    the micro-batch. None when the module returns the loss itself."""
    data_axes: tuple[str, ...] = ()
    """Axes of the mesh along which ranks have the same weights and other samples: their gradients are averaged."""

    def __post_init__(self) -> None:
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        unknown = [axis for axis in self.data_axes if axis not in names]
        if self.index < 0 or unknown:
            raise PipelineError(
                f"describing stage {self.index}: expected an index >= 0 and data axes among the mesh's {tuple(names)}, "
                f"found {self.data_axes}; name the axes of the mesh with mesh_dim_names"
            )


def spec_of(cut: Cut | None, ndim: int) -> str:
    """The sharding spec of a value with ``ndim`` dims.

    >>> spec_of([Shard(0), Replicate()], 2), spec_of(None, 3)
    ('S(0)R', 'RRR')
    """
    if isinstance(cut, str):
        return cut
    axes: list[list[int]] = [[] for _ in range(ndim)]
    for axis, placement in enumerate(cut or ()):
        if type(placement) is Shard and placement.dim < ndim:
            axes[placement.dim].append(axis)
        elif type(placement) is not Replicate:
            raise PipelineError(
                f"describing how a value of {ndim} dims lies on a stage's mesh: found {placement}, expected Shard of "
                "one of its dims, or Replicate; give and take whole values"
            )
    return "".join("R" if not each else f"S({','.join(map(str, each))})" for each in axes).replace("S()", "R")


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


class StageWork:
    """A stage at work on the micro-batches of one step."""

    def __init__(self, stage: Stage, makes: Sequence[str], num_microbatches: int) -> None:
        self._stage = stage
        self._makes = tuple(makes)
        """Names of the values that leave; empty on the last stage."""
        self._num_microbatches = num_microbatches
        self._stashes: dict[int, _Stash] = {}
        self.losses: dict[int, torch.Tensor] = {}
        """On the last stage: of each micro-batch."""
        self.peak_stashes = 0
        """Most micro-batches that were stashed at once."""

    def run_forward(self, microbatch: int, taken: Values, entries: Values, target: Any) -> dict[str, torch.Tensor]:
        """F: the values that leave, detached. ``taken`` are fresh tensors of this micro-batch alone."""
        inputs, begun = begin_graph(taken)
        made = call_module(self._stage, self._makes, {**begun, **entries}, target)
        if not self._makes:
            self.losses[microbatch] = made[LOSS].detach()
            made[LOSS] = made[LOSS] / self._num_microbatches
        outputs = {name: value for name, value in made.items() if value.requires_grad}
        self._stashes[microbatch] = _Stash(inputs, outputs)
        self.peak_stashes = max(self.peak_stashes, len(self._stashes))
        buffers = (_whole_or_local(buffer) for buffer in self._stage.module.buffers())
        kept = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        return {name: _leaving(value, kept) for name, value in made.items() if name != LOSS}

    def run_backward(self, microbatch: int, gradients: Values) -> dict[str, torch.Tensor]:
        """B: the gradients of the values that came, by name. ``gradients`` are those of the values that left."""
        stash = self._stashes.pop(microbatch)
        found = run_backward(self._roots(stash, gradients), list(stash.inputs.values()))
        return _filled(stash.inputs, found)

    def run_input_backward(self, microbatch: int, gradients: Values) -> dict[str, torch.Tensor]:
        """I: as B, but the weights' gradients are left to W."""
        stash = self._stashes[microbatch]
        found, stash.rest = run_input_backward(self._roots(stash, gradients), list(stash.inputs.values()))
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
            return Roots([outputs[LOSS]], [torch.ones_like(outputs[LOSS])])
        # A value may leave for several stages, or for none that sent a gradient back.
        named = [name for name in outputs if name in gradients]
        return Roots([outputs[name] for name in named], [gradients[name] for name in named])


def call_module(stage: Stage, makes: Sequence[str], arguments: Values, target: Any) -> dict[str, torch.Tensor]:
    """What the module of a stage makes, by name: the values in ``makes``, or the loss where that is empty."""
    made: Any = stage.module(**arguments)
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
    values = {name: _local(made[name], doing, name) for name in makes or (LOSS,)}
    if not makes and values[LOSS].numel() != 1:
        raise PipelineError(
            f"{doing}: its loss has shape {tuple(values[LOSS].shape)}, expected one number; give the last stage a loss"
        )
    return values


def add_gradients(parts: Iterable[Values]) -> dict[str, torch.Tensor]:
    """The gradients of values that left for several stages, added in the order of ``parts``."""
    total: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, gradient in part.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def _whole_or_local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _local(value: Any, doing: str, name: str) -> torch.Tensor:
    value = _whole_or_local(value)
    if not isinstance(value, torch.Tensor):
        raise PipelineError(
            f"{doing}: it made {name!r} of type {type(value).__name__}, expected a tensor; compute it where it is used"
        )
    return value


def _leaving(value: torch.Tensor, kept: set[int]) -> torch.Tensor:
    """What is sent of a value: a copy of what the module may change while it is on its way, its buffers."""
    is_kept = value.untyped_storage().data_ptr() in kept
    return value.detach().clone() if is_kept else value.detach()


def _filled(inputs: Values, found: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Gradients by name; zeros for inputs that nothing depends on, because a stage before waits for them."""
    return {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(inputs.items(), found, strict=True)
    }
