"""Layouts of the values of stages, and of their gradients.

How a value lies on the mesh of its stage is said in `Stage.takes` and `Stage.makes`; a DTensor says it for the axes of
its own mesh. A *described* value is what all ranks of a stage tell of it, alike: spec, global shape, dtype, of a
partial sum its axes and reduction, and what shares its memory.

Gradients. The loss of a pipeline is the mean of the losses of the last stage's data-parallel ranks. A stage with D of
them averages the gradients of its weights. So on each of its ranks everything is D times as large as its part of the
gradient, and what crosses to a stage with another D is scaled:

- where a value is *taken*, its gradient has D times its size. Along a data axis that does not cut the value, every rank
  has the gradient of its own samples: addends of a partial sum.
- where it is *made*, a value that is cut into F parts along data axes needs F times its gradient on each. One that is
  whole on each needs it as it is, because the average is of equals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from remesh.layout import Layout, Mesh, Spec, layout_from_spec, parse_spec
from remesh.layout.from_torch import dtype_name
from remesh.layout.torch_memory import find_shared
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.running.stage import Cut, Stage, lines_of, local_of

_REDUCTIONS = ("sum", "avg")
Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Described:
    """A value as it lies on the mesh of the stage that makes it."""

    spec: str
    """How it is cut; R on the axes of a partial sum."""
    shape: tuple[int, ...]
    """Of the whole value."""
    dtype: str
    partial_axes: Axes
    """Axes of the mesh along which ranks have addends of it."""
    reduction: str
    """Of the addends; ``"sum"`` where there are none."""
    aliases: Sequence[str]
    """Other values that share its memory; its own name where a buffer of the module does."""


@dataclass(frozen=True, slots=True)
class StageMesh:
    """The mesh of a stage as all ranks know it."""

    mesh: Mesh
    """Ranks are those of the group."""
    data_axes: Axes
    """Those of its axes along which ranks have other samples."""

    @property
    def width(self) -> int:
        """Number of its data-parallel ranks."""
        return math.prod(self.mesh.shape[axis] for axis in self.data_axes)

    def place_of(self, rank: int) -> tuple[int, ...]:
        """Of a rank of the stage, among those with other samples."""
        coordinate = self.mesh.coordinate_of(rank)
        return tuple(coordinate[axis] for axis in self.data_axes)


@dataclass(frozen=True, slots=True)
class EdgeEnd:
    """A value, and its gradient, as they lie at one end of an edge."""

    value: Layout
    gradient: Layout
    """Where the value is taken, held so; where it is made, wanted so."""
    scale: float
    """By what the gradient is multiplied for this end."""


def made_end(described: Described, at: StageMesh) -> EdgeEnd:
    """The end at which a value is made."""
    whole = layout_from_spec(described.spec, described.shape, at.mesh, described.dtype)
    cut = {axis for dim in parse_spec(described.spec).dims for axis in dim} | {*described.partial_axes}
    scale = math.prod(at.mesh.shape[axis] for axis in at.data_axes if axis in cut)
    num_addends = math.prod(at.mesh.shape[axis] for axis in described.partial_axes)
    value = _as_addends(whole, at.mesh, described.partial_axes, described.reduction)
    return EdgeEnd(value, whole, scale / num_addends if described.reduction == "avg" else scale)


def taken_end(spec: str, described: Described, at: StageMesh) -> EdgeEnd:
    """The end at which a value is taken, cut by ``spec``."""
    value = layout_from_spec(spec, described.shape, at.mesh, described.dtype)
    cut = {axis for dim in parse_spec(spec).dims for axis in dim}
    addends = tuple(axis for axis in at.data_axes if axis not in cut)
    return EdgeEnd(value, _as_addends(value, at.mesh, addends, "sum"), 1 / at.width)


def _as_addends(layout: Layout, mesh: Mesh, axes: Axes, reduction: str) -> Layout:
    """The same boxes as addends of partial sums along these axes."""
    if all(mesh.shape[axis] == 1 for axis in axes):
        return layout

    def addend_of(rank: int) -> int:
        coordinate, number = mesh.coordinate_of(rank), 0
        for axis in axes:
            number = number * mesh.shape[axis] + coordinate[axis]
        return number

    shards = tuple(replace(shard, addend=addend_of(int(shard.holder))) for shard in layout.shards)
    return Layout(layout.global_shape, shards, layout.dtype, reduction)


def cut_form(cut: Cut) -> Any:
    """A cut as text or as one number for each axis, the dim that it cuts, or None; for `spec_of`."""
    if isinstance(cut, str):
        return cut
    for placement in cut:
        if type(placement) not in (Shard, Replicate):
            raise PipelineError(
                f"describing how a value lies on a stage's mesh: found {placement}, expected Shard of one of its dims, "
                "or Replicate; give and take whole values"
            )
    return [placement.dim if isinstance(placement, Shard) else None for placement in cut]


def spec_of(form: str | Sequence[int | None], ndim: int) -> str:
    """The sharding spec of a value with ``ndim`` dims.

    >>> spec_of([0, None], 2), spec_of([], 3)
    ('S0R', 'RRR')
    """
    if isinstance(form, str):
        return form
    axes: list[list[int]] = [[] for _ in range(ndim)]
    for axis, dim in enumerate(form):
        if dim is not None and not -ndim <= dim < ndim:
            raise PipelineError(
                f"describing how a value of {ndim} dims lies on a stage's mesh: found Shard({dim}), expected Shard of "
                "one of its dims, or Replicate; correct the placement"
            )
        if dim is not None:
            axes[dim].append(axis)
    return str(Spec(tuple(map(tuple, axes))))


def check_is_named(stage: Stage, name: str, cuts: Mapping[str, Cut]) -> None:
    """`PipelineError` for a value of a stage with data-parallel ranks of which nobody has said how it lies there."""
    if stage.width > 1 and name not in cuts:
        raise PipelineError(
            f"describing the values of stage {stage.index}: nothing says how {name!r} lies on its {stage.width} data-"
            "parallel ranks, expected a spec, such as S0R for rows of samples, or RR for what is equal on all; name it "
            "in takes or makes"
        )


def describe_made(stage: Stage, made: Mapping[str, torch.Tensor], at: StageMesh) -> dict[str, Described]:
    """The values of which this rank has made its parts."""
    aliases = _find_aliases(stage, made)
    return {name: _describe(stage, name, value, at, aliases[name]) for name, value in made.items()}


def _describe(stage: Stage, name: str, value: torch.Tensor, at: StageMesh, aliases: Sequence[str]) -> Described:
    doing = f"describing the values of stage {stage.index}: {name!r}"
    own = _own_placements(value, stage, doing)
    if not own.keys() >= {axis for axis in at.data_axes if at.mesh.shape[axis] > 1}:
        check_is_named(stage, name, stage.makes)
    spec = spec_of(cut_form(stage.makes.get(name, [])), value.ndim)
    dims = [list(dim) for dim in parse_spec(spec).dims]
    if len(dims) != value.ndim or any(axis >= at.mesh.ndim for dim in dims for axis in dim):
        raise PipelineError(
            f"{doing} has {value.ndim} dims on a mesh of {at.mesh.ndim} axes, which {spec} does not fit; correct the "
            "spec"
        )
    partial: dict[int, str] = {}
    for axis, placement in own.items():
        declared = next((dim for dim, axes in enumerate(dims) if axis in axes), None)
        if declared is not None and placement != Shard(declared):
            raise PipelineError(
                f"{doing} is a DTensor with {placement} on axis {axis} of the mesh, but is declared {spec}; declare it "
                "as it is, or redistribute it"
            )
        if isinstance(placement, Partial):
            partial[axis] = placement.reduce_op
        elif isinstance(placement, Shard) and declared is None:
            dims[placement.dim] = sorted([*dims[placement.dim], axis])
    reductions = {*partial.values()} or {"sum"}
    if len(reductions) > 1 or not reductions <= {*_REDUCTIONS}:
        raise PipelineError(
            f"{doing} is partial by {sorted(reductions)}, expected one of {_REDUCTIONS}; redistribute it before it "
            "leaves"
        )
    shape = tuple(
        size * math.prod(at.mesh.shape[axis] for axis in axes)
        for size, axes in zip(local_of(value).shape, dims, strict=True)
    )
    whole = str(Spec(tuple(map(tuple, dims))))
    return Described(whole, shape, dtype_name(value.dtype), tuple(sorted(partial)), reductions.pop(), aliases)


def _find_aliases(stage: Stage, made: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    names = list(made)
    found: dict[str, list[str]] = {name: [] for name in names}
    for group in find_shared([local_of(one).detach() for one in (*made.values(), *stage.module.buffers())]):
        mine = [names[at] for at in group if at < len(names)]
        is_kept = len(mine) < len(group)
        for name in mine:
            found[name] = [other for other in mine if is_kept or other != name]
    return found


def _own_placements(value: torch.Tensor, stage: Stage, doing: str) -> dict[int, Placement]:
    """What a DTensor says of itself, by axes of its stage's mesh: those along which the same ranks are."""
    if not isinstance(value, DTensor):
        return {}
    if any(size % num for size, num in zip(value.shape, _num_parts(value), strict=True)):
        raise PipelineError(
            f"{doing} is a DTensor of shape {tuple(value.shape)} with {value.placements}, expected parts of one size "
            "on all ranks; pad it, or redistribute it before it leaves"
        )
    lines = lines_of(stage.mesh) if stage.mesh is not None else []
    found: dict[int, Placement] = {}
    for line, placement in zip(lines_of(value.device_mesh), value.placements, strict=True):
        if type(placement) not in (Shard, Replicate) and not isinstance(placement, Partial):
            raise PipelineError(f"{doing} is a DTensor with {placement}, expected Shard, Replicate or Partial")
        if len(line) > 1 and line not in lines:
            raise PipelineError(
                f"{doing} is a DTensor on ranks {line}, expected an axis of the mesh of its stage, {stage.mesh}; give "
                "the stage the mesh on which its values lie"
            )
        if len(line) > 1:
            found[lines.index(line)] = placement
    return found


def _num_parts(value: DTensor) -> list[int]:
    """Into how many parts each dim is cut."""
    parts = [1] * value.ndim
    for axis, placement in enumerate(value.placements):
        if isinstance(placement, Shard):
            parts[placement.dim] *= value.device_mesh.size(axis)
    return parts
