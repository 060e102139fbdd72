"""Resharding functions in PyTorch's terms: one buffer between two meshes, one DTensor.

`reshard_tensor` follows the sketch of PyTorch's RFC #181061 (an M-to-N primitive): a rank's role follows from the
meshes it is in. Source only: its buffer is read. Destination only: its buffer holds the new shard afterwards. Both:
the buffer is read in the old layout, then overwritten in the new one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from remesh.comm.gather import Group, gather_from
from remesh.foundation.errors import PlanError
from remesh.foundation.torch_private import never_compiled
from remesh.layout import Split, StridedSplit, local_shape_at
from remesh.layout.from_torch import Piece, piece_at, placements_from_torch
from remesh.layout.placement import Placement as PurePlacement
from remesh.resharding.planning.transfer import PlanOptions
from remesh.resharding.reshard_api import reshard
from remesh.resharding.running.cache import Resharder
from remesh.resharding.running.describe import Tensors, check_plan_options
from remesh.resharding.running.run import Moved
from remesh.resharding.target import Target, normalise

_NAME = "buf"
_DOING = "resharding a buffer between two meshes"


@never_compiled
def redistribute_across(
    tensor: DTensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    dtype: torch.dtype | None = None,
    group: Group = None,
    **options: Unpack[PlanOptions],
) -> DTensor:
    """A DTensor with the same values on another mesh, which may be disjoint from its own, overlap it, or be the same.

    What ``DTensor.redistribute`` does inside one mesh. Called by every rank of the group, which has the ranks of both
    meshes; ranks outside the tensor's mesh hold it without elements (as ``distribute_tensor`` returns it there).
    """
    target = Target(mesh, placements, dtype)
    return reshard({_NAME: tensor}, to=target, group=group, **options).made[_NAME]


@dataclass(frozen=True)
class _Side:
    """One side of a buffer, as one rank sees it."""

    mesh: DeviceMesh
    placements: tuple[PurePlacement, ...]
    coordinate: tuple[int, ...] | None
    """This rank's place in the mesh; None outside."""
    local_shape: tuple[int, ...] | None
    """Shape of the caller's shard, as the caller gave it; None outside."""

    @classmethod
    def of(
        cls, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int] | None, buf: torch.Tensor
    ) -> _Side:
        coordinate = mesh.get_coordinate()
        said = tuple(shape if shape is not None else buf.shape)
        pure = placements_from_torch(normalise(placements, len(said)))
        if coordinate is None:
            return cls(mesh, pure, None, None)
        return cls(mesh, pure, tuple(coordinate), said)

    def piece(self, buf: torch.Tensor, global_shape: tuple[int, ...]) -> Piece:
        """This rank's shard in the buffer."""
        assert self.coordinate is not None
        return piece_at(buf.reshape(-1), global_shape, self.mesh.shape, self.coordinate, self.placements)


@never_compiled
def reshard_tensor(  # noqa: PLR0913 - the shape of the RFC
    buf: torch.Tensor,
    src_mesh: DeviceMesh,
    src_placements: Sequence[Placement],
    dst_mesh: DeviceMesh,
    dst_placements: Sequence[Placement],
    *,
    src_local_shape: Sequence[int] | None = None,
    dst_local_shape: Sequence[int] | None = None,
    group: Group = None,
    **options: Unpack[PlanOptions],
) -> Moved:
    """Move a tensor from one mesh to another, in place in each rank's buffer; returns what was moved.

    Called by every rank of the group, which has the ranks of both meshes. ``buf`` is contiguous; on a rank of both
    meshes it has room for the larger of its two shards. A local shape may be left out where it is that of ``buf``.
    """
    sides: list[_Side] = []

    def tell() -> list[Any]:
        check_plan_options(options)
        sides.append(_Side.of(src_mesh, src_placements, src_local_shape, buf))
        sides.append(_Side.of(dst_mesh, dst_placements, dst_local_shape, buf))
        _check_buffer(buf, *sides)
        return [sides[0].coordinate, sides[0].local_shape]

    told = gather_from(tell, group, _DOING)
    shapes = {tuple(at): tuple(shape) for at, shape in told if at is not None}

    def ask() -> tuple[Tensors, Tensors]:
        source, target = sides
        global_shape = _global_shape(shapes, tuple(src_mesh.shape), source.placements)
        give = {_NAME: source.piece(buf, global_shape)} if source.coordinate is not None else {}
        take = {_NAME: target.piece(buf, global_shape)} if target.coordinate is not None else {}
        return give, take

    meeting = Resharder.for_one_call(group, options).meet(ask)
    return meeting.job.run(meeting.tag)


def _check_buffer(buf: torch.Tensor, source: _Side, target: _Side) -> None:
    needed = max(torch.Size(shape).numel() for shape in (source.local_shape, target.local_shape, (0,)) if shape)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not buf.is_contiguous() or buf.numel() < needed:
        raise PlanError(
            f"{_DOING}: on rank {rank} the buffer has {buf.numel()} elements"
            f"{'' if buf.is_contiguous() else ' and is not contiguous'}, expected {needed} contiguous ones, enough for "
            "its shards on both sides; give a larger buffer, and both local shapes"
        )


def _global_shape(
    shapes: dict[tuple[int, ...], tuple[int, ...]], mesh_shape: tuple[int, ...], placements: Sequence[PurePlacement]
) -> tuple[int, ...]:
    """The shape whose shards are these, by coordinate in the source mesh."""
    everywhere = list(itertools.product(*map(range, mesh_shape)))
    absent = [at for at in everywhere if at not in shapes]
    if absent:
        raise PlanError(
            f"{_DOING}: the group has {len(shapes)} of {len(everywhere)} ranks of the source mesh, expected all, the "
            f"one at {absent[0]} is not there; call it on every rank of both meshes"
        )
    ndim = len(shapes[everywhere[0]])
    sizes = []
    for dim in range(ndim):
        cutting = [
            axis
            for axis, placement in enumerate(placements)
            if isinstance(placement, Split | StridedSplit) and placement.dim == dim
        ]
        line = [at for at in everywhere if all(i == 0 for axis, i in enumerate(at) if axis not in cutting)]
        sizes.append(sum(shapes[at][dim] for at in line))
    whole = tuple(sizes)
    for at in everywhere:
        expected = local_shape_at(whole, mesh_shape, at, placements)
        if shapes[at] != expected:
            raise PlanError(
                f"{_DOING}: the shards add up to global shape {whole}, of which the one at {at} should have shape "
                f"{expected} but has {shapes[at]}; cut it as DTensor does, or give the pieces to remesh.reshard"
            )
    return whole
