"""Adapters from torch's DTensor, DeviceMesh and dtypes to layouts.

No other module of this package but `remesh.layout.torch_memory` imports torch. Nothing here communicates or
needs a process group: a DTensor knows its mesh coordinate, and the rest is arithmetic. So all of it works after
the group is gone, which is when a surviving rank needs it most.

A DTensor of FSDP2 needs no case of its own: its placements (``Shard``, or ``_StridedShard`` where tensor parallelism
cuts the same dim) are enough.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, debug, placement_types as torch_placements
from torch.nn.parameter import is_lazy

from remesh.foundation.errors import LayoutError
from remesh.foundation.linux.procfs import read_areas
from remesh.foundation.torch_private import AsyncCollectiveTensor, FakeTensor, StridedShard
from remesh.layout.box import Box
from remesh.layout.dtypes import ITEMSIZE_BYTES
from remesh.layout.layout import Layout
from remesh.layout.mesh import Mesh
from remesh.layout.placement import (
    Partial,
    Placement,
    Replicate,
    Split,
    StridedSplit,
    addend_at,
    boxes_at,
    layout_from_placements,
    local_shape_at,
    reduce_op_of,
)
from remesh.layout.shard import Shard

_OWN_MEMORY = (torch.Tensor, torch.nn.Parameter)
"""Types whose dense tensors always have it; those derived from them may be made of other tensors."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A local tensor and where its elements sit in the global one."""

    tensor: torch.Tensor
    """Detached, sharing memory with what it was made from. Any strides; the shards see it as row-major."""
    global_shape: tuple[int, ...]
    """Shape of the whole tensor, in elements."""
    shards: tuple[Shard, ...]
    """Which boxes it keeps: holder 0 is a placeholder, offsets and strides index the flattened local tensor.
    Empty on a rank outside the tensor's mesh."""
    partial: str | None = None
    """Reduction that joins the addends (see ``Shard.addend``), or None."""


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """One piece that gives what several give of one tensor, one after another in one buffer.

    It lies on the device of the first one. Pieces that add no box are left out: often one is left, and nothing copied.
    """
    parts: list[Piece] = []
    shards, start, seen = [], 0, set()
    for piece in pieces:
        added = [shard for shard in piece.shards if (shard.box, shard.addend) not in seen]
        if not added and parts:
            continue
        seen |= {(shard.box, shard.addend) for shard in added}
        shards += [replace(shard, offset=shard.offset + start) for shard in added]
        parts.append(piece)
        start += piece.tensor.numel()
    first = parts[0]
    if len(parts) == 1:
        return first
    flat = torch.cat([piece.tensor.reshape(-1).to(first.tensor.device) for piece in parts])
    return Piece(flat, first.global_shape, tuple(shards), first.partial)


def join_if_alike(old: Piece, new: Piece) -> Piece:
    """One piece with what both hold of one tensor; ``old`` alone where they cannot be one: addends, or two dtypes."""
    are_alike = old.partial is new.partial is None and old.tensor.dtype == new.tensor.dtype
    return join_pieces([old, new]) if are_alike else old


def dtensor_of(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[torch_placements.Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """A DTensor of this global shape around a rank's part, which is empty outside the mesh. Calls no other rank."""
    if not shape and not local.numel():
        # Torch takes () for "not given", and then takes the shape of the local tensor.
        local = local.new_empty(())
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def piece_of(tensor: torch.Tensor | Piece) -> Piece:
    """This rank's part of a DTensor (any placement), or all of a plain tensor, as a Piece; a Piece stays itself."""
    if isinstance(tensor, Piece):
        return tensor
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(
            f"looking for the boxes of a {type(tensor).__name__}: expected a DTensor, a tensor or a Piece; "
            "convert it first"
        )
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return Piece(tensor.detach(), shape, (Shard(0, Box.of_shape(shape)),))
    local = _local_of(tensor)
    shape, mesh_shape = tuple(tensor.shape), tuple(tensor.device_mesh.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    placements = _placements_of(tensor)
    if coordinate is None:
        return Piece(local, shape, (), reduce_op_of(placements))
    held = _held_at(shape, mesh_shape, tuple(coordinate), placements)
    if tuple(local.shape) != held.local_shape and (local.numel() or math.prod(held.local_shape)):
        raise LayoutError(
            f"looking for the boxes of a DTensor of shape {shape}: its local tensor has shape {tuple(local.shape)}, "
            f"expected {held.local_shape} by placements {tuple(tensor.placements)} at coordinate {tuple(coordinate)} "
            f"of mesh {mesh_shape}; give uneven local tensors as Piece, with their own boxes"
        )
    return Piece(local, shape, held.shards, held.partial)


@dataclass(frozen=True, slots=True)
class _HeldByCoordinate:
    """The shards of a DTensor on one coordinate of a mesh."""

    shards: tuple[Shard, ...]
    local_shape: tuple[int, ...]
    partial: str | None


@lru_cache(maxsize=4096)
def _held_at(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> _HeldByCoordinate:
    """Remembered, since the parameters of a model have few different shapes."""
    addend = addend_at(mesh_shape, coordinate, placements)
    boxes = boxes_at(shape, mesh_shape, coordinate, placements)
    return _HeldByCoordinate(
        tuple(Shard(0, box, offset, strides, addend) for box, offset, strides in boxes),
        local_shape_at(shape, mesh_shape, coordinate, placements),
        reduce_op_of(placements),
    )


def layout_of(tensor: DTensor, hosts: str | Sequence[str] | Mapping[int, str] = "localhost") -> Layout:
    """The layout of a DTensor over the ranks of its mesh; equal on all ranks, without communication."""
    mesh = mesh_from_torch(tensor.device_mesh, hosts)
    return layout_from_placements(tuple(tensor.shape), mesh, _placements_of(tensor), dtype_name(tensor.dtype))


def mesh_from_torch(device_mesh: DeviceMesh, hosts: str | Sequence[str] | Mapping[int, str] = "localhost") -> Mesh:
    """The mesh of a DeviceMesh; axes without names are called ``axis0``, ``axis1``, ...

    ``hosts``: one name for all, one per rank in row-major order of the mesh, or a map from world rank.
    """
    sizes = tuple(device_mesh.shape)
    names = device_mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(len(sizes)))
    ranks = device_mesh.mesh.reshape(-1).tolist()
    if isinstance(hosts, Mapping):
        lacking = [rank for rank in ranks if rank not in hosts]
        if lacking:
            raise LayoutError(f"making a mesh of {len(ranks)} ranks: rank {lacking[0]} has no host; name one for each")
        hosts = [hosts[rank] for rank in ranks]
    return Mesh.of(dict(zip(names, sizes, strict=True)), ranks, hosts)


def placements_from_torch(placements: Sequence[torch_placements.Placement]) -> tuple[Placement, ...]:
    """The pure twins of DTensor placements; dims must be normalised (not negative), as DTensor keeps them."""
    return tuple(map(_placement_from_torch, placements))


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Name of a torch dtype, as layouts use it: ``"float32"``."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE_BYTES:
        raise LayoutError(f"naming dtype {dtype}: layouts know {sorted(ITEMSIZE_BYTES)}; convert the tensor first")
    return name


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name."""
    found = getattr(torch, name, None) if name in ITEMSIZE_BYTES else None
    if not isinstance(found, torch.dtype):
        raise LayoutError(
            f"looking up torch dtype {name!r}: torch {torch.__version__} has none of that name; cast the tensor, or "
            "take a torch that has it"
        )
    return found


def forget_meshes() -> None:
    """Clear DTensor's caches; to be called when a living process gets another rank.

    DTensor remembers the results of its operators by mesh, and compares meshes without the rank of the process
    (seen in torch 2.13). After a new process group in which this process has another rank, an equal mesh would
    bring back results that carry the old mesh and the old coordinate: a wrong slice, silently.
    """
    clear_all = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear_all is None:
        raise LayoutError(
            f"clearing DTensor's caches: torch {torch.__version__} has no torch.distributed.tensor.debug."
            "_clear_sharding_prop_cache; use a torch in which a process may change its rank, or start a new process"
        )
    clear_all()


def find_read_only(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the first tensor whose memory may not be written, such as a read-only map of a file; None if none is.

    A write would end the process. What torch has allocated itself is writable, and its storage can be resized.
    """
    given = [
        (name, tensor.untyped_storage())
        for name, tensor in tensors
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested and tensor.numel()
        if not tensor.untyped_storage().resizable()
    ]
    areas = [area for area in read_areas(os.getpid()) if area.protection[1] != "w"] if given else []
    for name, storage in given:
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if any(area.start < stop and start < area.end for area in areas):
            return name
    return None


def why_without_memory(tensor: torch.Tensor) -> str | None:
    """Why the elements of a tensor do not lie in memory of its own, in words that follow "it is"; None when they do.

    >>> why_without_memory(torch.ones(2, device="meta"))
    'on the device meta, without values'
    """
    if is_lazy(tensor):
        return "not initialised yet"
    if tensor.is_nested:
        return "nested"
    if isinstance(tensor, FakeTensor):
        return "a FakeTensor, without values"
    if tensor.is_meta:
        return "on the device meta, without values"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}"
    if type(tensor) not in _OWN_MEMORY and tensor.numel() and not _has_address(tensor):
        return f"a {type(tensor).__name__}, which is made of other tensors"
    if not _has_all_storage(tensor):
        num_bytes = tensor.untyped_storage().nbytes()
        return f"larger than its storage of {num_bytes} bytes, which was freed or cut, as by FSDP or offloading"
    return None


def _has_all_storage(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor, by its shape and strides, lies within its storage: torch itself reads what is behind.

    >>> cut = torch.ones(4)
    >>> _ = cut.untyped_storage().resize_(8)
    >>> _has_all_storage(cut), _has_all_storage(cut[:2])
    (False, True)
    """
    reach = reach_of(tensor)
    return not reach or (tensor.storage_offset() + reach) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def reach_of(tensor: torch.Tensor) -> int:
    """Elements from the first to the last of a strided tensor in its memory, with what lies between.

    >>> reach_of(torch.ones(4, 6)[:2, :3])
    9
    """
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.numel()
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _has_address(tensor: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        return False


def _local_of(tensor: DTensor) -> torch.Tensor:
    """The local tensor itself: without autograd ``to_local`` returns no view or copy, and detaching shares memory."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _local_of(tensor)
    local = tensor.to_local()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    return local.detach()


def _placements_of(tensor: DTensor) -> tuple[Placement, ...]:
    placements = placements_from_torch(tensor.placements)
    _check_shard_order(tensor)
    return placements


def _check_shard_order(tensor: DTensor) -> None:
    """Refuse the device orders of a dim that placements alone do not show (torch calls them shard orders)."""
    order = getattr(tensor._spec, "shard_order", None)
    for entry in order or ():
        axes = tuple(entry.mesh_dims)
        if axes != tuple(sorted(axes)):
            raise LayoutError(
                f"looking for the boxes of a DTensor of shape {tuple(tensor.shape)}: dim {entry.tensor_dim} is "
                f"cut over mesh axes in the order {axes}, expected {tuple(sorted(axes))}; "
                "redistribute it to the usual order"
            )


def _placement_from_torch(placement: torch_placements.Placement) -> Placement:
    # _StridedShard first: depending on torch's version it is, or is not, a subclass of Shard.
    if isinstance(placement, StridedShard):
        return StridedSplit(placement.dim, int(placement.split_factor))
    if type(placement) is torch_placements.Shard:
        return Split(placement.dim)
    if type(placement) is torch_placements.Replicate:
        return Replicate()
    if type(placement) is torch_placements.Partial:
        return Partial(placement.reduce_op)
    raise LayoutError(
        f"reading DTensor placement {placement!r}: {type(placement).__name__} has no known rule; expected Shard, "
        "_StridedShard, Replicate or Partial; redistribute the tensor first"
    )
