"""Geometry of flattened slices (flat optimizer shards): their places in the global tensor and in the file. Pure.

Definitions. A *flattened slice* is a 1-D run ``[start, stop)`` of a grid cell that was flattened row-major; optimizers
that shard flat parameters hold such slices. Its *pieces* are the boxes of the global tensor that it consists of, at
most ``2 * ndim - 1``. Its *stored form* is a run of a tensor of shape ``number of cells in each axis + (elements of a
cell,)``, which is how readers and writers of this format agree to store it.

Algorithm of a load from the stored form:

1. A request that is a slice of the same grid is a run of the stored tensor.
2. Any other request is taken to pieces, every stored run too; both are layouts of the tensor before flattening.
3. Each slice of their overlap lies in one piece of one run, where it is some runs of elements at equal distances. They
   are read one by one, or together with the gaps between them where those are small.
4. What is asked for lands in the caller's tensor directly, or in a buffer that is copied there afterwards.

Pieces, overlaps and runs are those of `remesh.layout`; nothing here compares boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.plan.manifest import Manifest, StoredTensor
from remesh.checkpoint.values.entities import ShardedBase, ShardedTensor
from remesh.layout import (
    Box,
    Layout,
    Shard,
    boxes_of_flat_range,
    compute_missing,
    compute_overlap,
    flat_range_of_box,
    row_major_strides,
)

_MAX_RUNS = 4096
"""Runs of one slice that are asked for one by one."""
_MAX_OVERREAD = 1.1
"""Elements read for each element wanted, up to which the runs of a slice are read as one."""


def unflatten(tensor: ShardedTensor) -> list[ShardedTensor]:
    """The pieces of a flattened slice as tensors of their own, which share its data; another tensor is its own piece.

    >>> held = slice(1, 5)
    >>> flat = ShardedTensor.from_rank_offsets_flat("w", torch.arange(4), (2, 3), (1, 0, 2), flattened_range=held)
    >>> [(str(piece.global_box()), piece.data.tolist()) for piece in unflatten(flat)]
    [('[0:1, 1:3]', [[0, 1]]), ('[1:2, 0:2]', [[2, 3]])]
    """
    if tensor.flattened_range is None:
        return [tensor]
    cell, held = tensor.global_box(), tensor.flattened_range
    pieces, at = [], 0
    for box in boxes_of_flat_range(cell, held.start, held.stop):
        shape = box.shape[tensor.prepend_axis_num :]
        data = None if tensor.data is None else tensor.data.detach()[at : at + box.size].view(shape)
        at += box.size
        pieces.append(
            replace(
                tensor,
                data=data,
                local_shape=shape,
                global_offset=box.start,
                axis_fragmentations=None,
                flattened_range=None,
            )
        )
    return pieces


def unflatten_all(entities: Iterable[ShardedBase]) -> list[ShardedBase]:
    """All entities, flattened slices taken to pieces."""
    pieces: list[ShardedBase] = []
    for entity in entities:
        pieces += unflatten(entity) if isinstance(entity, ShardedTensor) else [entity]
    return pieces


def stored_form(tensor: ShardedTensor) -> ShardedTensor:
    """A flattened slice as the box of the tensor that is stored for it."""
    assert tensor.flattened_range is not None
    assert tensor.axis_fragmentations is not None
    ndim, length = len(tensor.global_shape), tensor.data_shape[0]
    data = None if tensor.data is None else tensor.data.detach()[(None,) * ndim]
    return ShardedTensor(
        tensor.key,
        data,
        tensor.dtype,
        (1,) * ndim + (length,),
        (*tensor.axis_fragmentations, math.prod(tensor.local_shape)),
        (*tensor.local_chunk_offset_in_global(), tensor.flattened_range.start),
        None,
        tensor.replica_id,
    )


def reroute(
    requests: Sequence[ShardedTensor], manifest: Manifest
) -> tuple[list[ShardedTensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """What to ask for so that all requests, which have data, get filled: flattened or not, stored flattened or not.

    Of what is asked for nothing is flattened. When it is filled, the pairs ``(to, from)`` are to be copied. Raises
    `CheckpointMismatchError` where shapes differ or elements are not stored.
    """
    tensors: list[ShardedTensor] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    pieces: dict[str, list[ShardedTensor]] = {}
    for request in requests:
        before = manifest.unflattened_shapes.get(request.key)
        stored = manifest.tensors.get(request.key) if before is not None else None
        if before is None or stored is None:
            tensors += unflatten(request)
            continue
        if request.global_shape != before:
            raise CheckpointMismatchError(
                f"Global shape mismatch for loaded ({before}) and expected ({request.global_shape}) tensor for key "
                f"{request.key}, which is stored flattened"
            )
        form = None if request.flattened_range is None else stored_form(request)
        if form is not None and form.global_shape == stored.global_shape:
            tensors += [form] if form.local_shape[-1] else []
        else:
            pieces.setdefault(request.key, []).extend(unflatten(request))
    for key, wanted in pieces.items():
        if not wanted:  # of a slice without elements
            continue
        for tensor, to in _from_runs(wanted, manifest.tensors[key], manifest.unflattened_shapes[key]):
            tensors.append(tensor)
            if to is not None:
                assert tensor.data is not None
                copies.append(to)
    return tensors, copies


def shapes_before_flattening(entities: Iterable[ShardedBase]) -> dict[str, tuple[int, ...]]:
    """The global shape of every tensor that has flattened slices, by key."""
    return {
        one.key: one.global_shape
        for one in entities
        if isinstance(one, ShardedTensor) and one.flattened_range is not None
    }


_Asked = tuple[ShardedTensor, tuple[torch.Tensor, torch.Tensor] | None]
"""A box of the stored tensor to ask for, and the copy to make once it is there."""


@dataclass(frozen=True, slots=True)
class _StoredRun:
    """A box of the tensor before flattening that is one run of a stored cell."""

    cell: tuple[int, ...]
    """Index of the cell in the grid."""
    start: int
    """First element in the flattened cell."""
    box: Box


def _from_runs(wanted: Sequence[ShardedTensor], stored: StoredTensor, shape: tuple[int, ...]) -> list[_Asked]:
    key = wanted[0].key
    runs = {f"run:{number}": run for number, run in enumerate(_runs_of(stored, shape))}
    wants = {f"want:{number}": want for number, want in enumerate(wanted)}
    src = Layout(shape, tuple(Shard(name, run.box) for name, run in runs.items()), stored.dtype)
    dst = Layout(shape, tuple(Shard(name, want.global_box()) for name, want in wants.items()), stored.dtype)
    asked: list[_Asked] = []
    num_filled = 0
    for part in compute_overlap(src, dst, name=key):
        run = runs[str(part.givers[0].holder)]
        for taker in part.takers:
            want = wants[str(taker.holder)]
            place = want.data_in_box()[part.box.relative_to(want.global_box()).slices()]
            asked += _ask(part.box, run, want, place, stored.global_shape)
            num_filled += part.box.size
    if num_filled != sum(want.global_box().size for want in wanted):
        boxes = compute_missing(src, dst)
        raise CheckpointMismatchError(
            f"tensor {key!r}: {len(boxes)} requested boxes are not in any stored slice, the first is {boxes[0]}; the "
            "checkpoint was saved without a part of the state"
        )
    return asked


def _runs_of(stored: StoredTensor, shape: tuple[int, ...]) -> list[_StoredRun]:
    parts = stored.global_shape[:-1]
    cell_shape = tuple(n // part for n, part in zip(shape, parts, strict=True))
    runs = []
    for chunk in stored.chunks:
        for cell in _cells(chunk.box):
            whole = Box.at(tuple(at * n for at, n in zip(cell, cell_shape, strict=True)), cell_shape)
            at = chunk.box.start[-1]
            for box in boxes_of_flat_range(whole, at, chunk.box.stop[-1]):
                runs.append(_StoredRun(cell, at, box))
                at += box.size
    return runs


def _cells(box: Box) -> list[tuple[int, ...]]:
    """Indices of the grid cells that a stored chunk spans; writers make chunks of one cell."""
    cells: list[tuple[int, ...]] = [()]
    for start, stop in zip(box.start[:-1], box.stop[:-1], strict=True):
        cells = [(*cell, at) for cell in cells for at in range(start, stop)]
    return cells


def _ask(
    box: Box, run: _StoredRun, want: ShardedTensor, place: torch.Tensor, stored_shape: tuple[int, ...]
) -> list[_Asked]:
    """How to fill ``place`` with the elements of ``box``, which lies in ``run``."""
    inside = flat_range_of_box(run.box, box)
    if inside is not None:
        data = place.view(-1) if place.is_contiguous() else place.new_empty(box.size)
        tensor = _stored_run(want, data, run.cell, run.start + inside[0], stored_shape)
        return [(tensor, None if place.is_contiguous() else (place, data.view(place.shape)))]
    parts = list(box.runs(run.box))
    first, stop = parts[0][0], parts[-1][0] + parts[-1][1]
    if len(parts) > _MAX_RUNS or stop - first <= _MAX_OVERREAD * box.size:
        data = place.new_empty(stop - first)
        seen = data.as_strided(place.shape, row_major_strides(run.box.shape))
        return [(_stored_run(want, data, run.cell, run.start + first, stored_shape), (place, seen))]
    data = place.new_empty(box.size)
    asked: list[_Asked] = []
    at = 0
    for start, length in parts:
        asked.append((_stored_run(want, data[at : at + length], run.cell, run.start + start, stored_shape), None))
        at += length
    asked[-1] = (asked[-1][0], (place, data.view(place.shape)))
    return asked


def _stored_run(
    want: ShardedTensor, data: torch.Tensor, cell: tuple[int, ...], start: int, stored_shape: tuple[int, ...]
) -> ShardedTensor:
    shape = (1,) * len(cell) + (len(data),)
    seen = data.view(shape)
    return ShardedTensor(want.key, seen, want.dtype, shape, stored_shape, (*cell, start), None)
