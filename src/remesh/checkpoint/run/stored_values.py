"""Values of stored tensors, read box by box or compared, by one process, in bounded memory.

Comparing goes band by band, so it needs two bands of memory whatever the size and the cut of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from remesh.checkpoint.formats.blob_frame import bytes_of
from remesh.checkpoint.plan.slabs import plan_slabs
from remesh.checkpoint.run.reader import OpenCheckpoint, plan_fill, run_fill
from remesh.checkpoint.values.entities import ShardedTensor
from remesh.layout import Box
from remesh.layout.from_torch import torch_dtype

BAND_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """How one name differs between two checkpoints."""

    key: str
    what: str
    """In words."""
    num_elements: int = 0
    """How many values differ."""
    largest: float = 0.0
    """Largest absolute difference; NaN where one is."""


def shape_of(checkpoint: OpenCheckpoint, key: str) -> tuple[int, ...]:
    """The global shape of a stored tensor, before it was flattened where it was."""
    manifest = checkpoint.manifest
    return manifest.unflattened_shapes.get(key, manifest.tensors[key].global_shape)


def cut_of(checkpoint: OpenCheckpoint, key: str) -> list[Box]:
    """The boxes in which a tensor is stored; of a flattened one the cells that were flattened."""
    stored, shape = checkpoint.manifest.tensors[key], shape_of(checkpoint, key)
    if key not in checkpoint.manifest.unflattened_shapes:
        return list(dict.fromkeys(chunk.box for chunk in stored.chunks))
    grid = stored.global_shape[:-1]
    cell = tuple(size // count for size, count in zip(shape, grid, strict=True))
    starts = (tuple(at * step for at, step in zip(index, cell, strict=True)) for index in product(*map(range, grid)))
    return [Box.at(start, cell) for start in starts]


def read_box(checkpoint: OpenCheckpoint, key: str, box: Box | None = None) -> torch.Tensor:
    """The values of a box of a stored tensor, or all of it; whatever chunks it lies in, flattened or not."""
    manifest = checkpoint.manifest
    dtype, shape = torch_dtype(manifest.tensors[key].dtype), shape_of(checkpoint, key)
    box = Box.of_shape(shape) if box is None else box
    wanted = ShardedTensor(key, None, dtype, box.shape, shape, box.start, None)
    values: torch.Tensor = run_fill(checkpoint, plan_fill(checkpoint, [wanted]))[0]
    return values


def bands_of(dtype: str, shape: tuple[int, ...], band_bytes: int = BAND_BYTES) -> Iterator[Box]:
    """Disjoint boxes that make up a tensor, each of about so many bytes at most, in row-major order."""
    for slab in plan_slabs(shape, Box.of_shape(shape), max(1, band_bytes // torch_dtype(dtype).itemsize), 0):
        yield slab.box


def read_bands(
    checkpoint: OpenCheckpoint, key: str, box: Box | None = None, band_bytes: int = BAND_BYTES
) -> Iterator[torch.Tensor]:
    """The values of a box, or all, as parts of about so many bytes at most; their elements follow row-major."""
    whole = Box.of_shape(shape_of(checkpoint, key)) if box is None else box
    for band in bands_of(checkpoint.manifest.tensors[key].dtype, whole.shape, band_bytes):
        start = tuple(a + b for a, b in zip(band.start, whole.start, strict=True))
        yield read_box(checkpoint, key, Box.at(start, band.shape))


def compare(left: OpenCheckpoint, right: OpenCheckpoint, key: str, band_bytes: int = BAND_BYTES) -> Difference | None:
    """How a tensor of both differs, or None. Values of different dtypes are compared as numbers; NaN equals NaN."""
    one, other = left.manifest.tensors[key], right.manifest.tensors[key]
    shape, their_shape = shape_of(left, key), shape_of(right, key)
    if shape != their_shape:
        return Difference(key, f"shape {shape} and {their_shape}")
    num_differing, largest = 0, 0.0
    for box in bands_of(one.dtype, shape, band_bytes):
        a, b = read_box(left, key, box), read_box(right, key, box)
        if torch.equal(bytes_of(a), bytes_of(b)) and one.dtype == other.dtype:
            continue
        a, b = _numbers(a), _numbers(b)
        differs = (a != b) & ~(a.isnan() & b.isnan())
        if num := int(differs.sum()):
            num_differing += num
            found = (a - b).abs()[differs].max().item()
            largest = found if math.isnan(found) or found > largest else largest
    words = [] if one.dtype == other.dtype else [f"dtype {one.dtype} and {other.dtype}"]
    if num_differing:
        words.append(f"{num_differing} of {math.prod(shape)} values, by up to {largest:g}")
    return Difference(key, "; ".join(words), num_differing, largest) if words else None


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
