"""Targets of a reshard: a mesh and placements, and the empty tensors that are made for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from remesh.comm.gather import Group, gather_from, reporting_lack_of_memory
from remesh.foundation.errors import PlanError
from remesh.foundation.options import check_option
from remesh.foundation.torch_private import StridedShard
from remesh.layout import local_shape_at, row_major_strides
from remesh.layout.from_torch import dtensor_of, dtype_name, piece_of, placements_from_torch, torch_dtype
from remesh.layout.placement import check_placements
from remesh.resharding.running.describe import Tensors, check_tensors

_DOING = "making the tensors to reshard into"


@dataclass(frozen=True)
class Target:
    """A mesh, with the placements of a tensor on it and its dtype."""

    mesh: DeviceMesh
    """Any mesh of ranks of the group; it needs no process groups of its own (``_init_backend=False`` will do)."""
    placements: Sequence[Placement]
    """One per axis of the mesh; no ``Partial``."""
    dtype: torch.dtype | None = None
    """None keeps the dtype that the tensor has."""


Targets = Target | Mapping[str, Target]
"""One target for all tensors, or one for each of those that are wanted."""


Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and global shape of tensors, by name."""


def gather_shapes(give: Tensors, group: Group = None) -> Shapes:
    """Gather the shapes of all tensors that ranks give. Called by every rank of the group; equal on all."""

    def describe() -> list[Any]:
        check_tensors(give, "give")
        pieces = {name: piece_of(give[name]) for name in sorted(give)}
        return [[name, dtype_name(p.tensor.dtype), list(p.global_shape)] for name, p in pieces.items()]

    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for told in gather_from(describe, group, _DOING):
        for name, dtype, shape in told:
            shapes.setdefault(name, (dtype, tuple(shape)))
    return shapes


def make_targets(to: Targets, shapes: Shapes) -> dict[str, DTensor]:
    """Empty DTensors on their targets, for every tensor that is given and that ``to`` names. Calls no other rank.

    Ranks outside a mesh get its DTensors without elements. `PlanError` where there is no memory for them.
    """

    def lack(name: str, words: str) -> PlanError:
        return PlanError(
            f"{_DOING}: this rank's parts of {len(shapes)} tensors have {sum(local_bytes(to, shapes).values())} bytes, "
            f"found no memory for {name!r} ({words}); none of them has moved; free memory, or move them by (smaller) "
            "windows"
        )

    made: dict[str, DTensor] = {}
    for name, (target, shape, dtype) in _wanted(to, shapes).items():
        with reporting_lack_of_memory(partial(lack, name)):
            local = torch.empty(_local_shape(target, shape), dtype=dtype, device=target.mesh.device_type)
            placements = normalise(target.placements, len(shape))
            made[name] = dtensor_of(local, target.mesh, placements, shape, row_major_strides(shape))
    return made


def local_bytes(to: Targets, shapes: Shapes) -> dict[str, int]:
    """Bytes of this rank's part of each tensor that `make_targets` would make. Calls no other rank."""
    return {
        name: math.prod(_local_shape(target, shape)) * dtype.itemsize
        for name, (target, shape, dtype) in _wanted(to, shapes).items()
    }


def _wanted(to: Targets, shapes: Shapes) -> dict[str, tuple[Target, tuple[int, ...], torch.dtype]]:
    """Target, global shape and dtype of each tensor that is wanted, by name."""
    check_option(_DOING, "to", to, Targets)
    if isinstance(to, Mapping):
        unknown = sorted(to.keys() - shapes.keys())
        if unknown:
            raise PlanError(
                f"{_DOING}: {len(unknown)} targets such as {unknown[0]!r} are of tensors that no rank gives, expected "
                f"names among {len(shapes)} given ones; give it on some rank, or drop the target"
            )
    wanted = {}
    for name in sorted(shapes):
        target = to.get(name) if isinstance(to, Mapping) else to
        if target is not None:
            dtype, shape = shapes[name]
            wanted[name] = (target, shape, target.dtype or torch_dtype(dtype))
    return wanted


def _local_shape(target: Target, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of this rank's part; without elements if the rank is outside the mesh."""
    mesh_shape, coordinate = tuple(target.mesh.shape), target.mesh.get_coordinate()
    placements = placements_from_torch(normalise(target.placements, len(shape)))
    check_placements(shape, mesh_shape, placements)
    return (0,) if coordinate is None else local_shape_at(shape, mesh_shape, tuple(coordinate), placements)


def normalise(placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """Placements with dims counted from 0, as DTensor keeps them."""
    normal: list[Placement] = []
    for placement in placements:
        if isinstance(placement, StridedShard) and placement.dim < 0:
            normal.append(StridedShard(placement.dim + ndim, split_factor=placement.split_factor))
        elif isinstance(placement, Shard) and placement.dim < 0:
            normal.append(Shard(placement.dim + ndim))
        else:
            normal.append(placement)
    return tuple(normal)
