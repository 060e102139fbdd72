"""What values does a checkpoint hold? Boxes of stored tensors read on their own, by one process, in bounded memory.

Comparing goes band by band, so it needs two bands of memory whatever the size and the cut of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from remesh.dist_checkpointing.manifest import StoredTensor
from remesh.dist_checkpointing.mapping import ShardedTensor
from remesh.dist_checkpointing.reader import OpenCheckpoint, plan_fill, run_fill
from remesh.dist_checkpointing.slabs import plan_slabs
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


def read_box(checkpoint: OpenCheckpoint, key: str, box: Box | None = None) -> torch.Tensor:
    """The values of a box of a stored tensor, or all of it; whatever chunks it lies in."""
    stored = checkpoint.manifest.tensors[key]
    box = Box.of_shape(stored.global_shape) if box is None else box
    wanted = ShardedTensor(key, None, torch_dtype(stored.dtype), box.shape, stored.global_shape, box.start, None)
    return run_fill(checkpoint.directory, plan_fill(checkpoint, [wanted]))[0][0]


def bands_of(stored: StoredTensor, band_bytes: int = BAND_BYTES) -> Iterator[Box]:
    """Disjoint boxes that make up a tensor, each of about so many bytes at most, in row-major order."""
    shape, itemsize = stored.global_shape, torch_dtype(stored.dtype).itemsize
    for slab in plan_slabs(shape, Box.of_shape(shape), max(1, band_bytes // itemsize), 0):
        yield slab.box


def compare(left: OpenCheckpoint, right: OpenCheckpoint, key: str, band_bytes: int = BAND_BYTES) -> Difference | None:
    """How a tensor of both differs, or None. Values of different dtypes are compared as numbers; NaN equals NaN."""
    one, other = left.manifest.tensors[key], right.manifest.tensors[key]
    if one.global_shape != other.global_shape:
        return Difference(key, f"shape {one.global_shape} and {other.global_shape}")
    num_differing, largest = 0, 0.0
    for box in bands_of(one, band_bytes):
        a, b = read_box(left, key, box), read_box(right, key, box)
        if torch.equal(_bytes_of(a), _bytes_of(b)) and one.dtype == other.dtype:
            continue
        a, b = _numbers(a), _numbers(b)
        differs = (a != b) & ~(a.isnan() & b.isnan())
        if num := int(differs.sum()):
            num_differing += num
            found = (a - b).abs()[differs].max().item()
            largest = found if math.isnan(found) or found > largest else largest
    words = [] if one.dtype == other.dtype else [f"dtype {one.dtype} and {other.dtype}"]
    if num_differing:
        words.append(f"{num_differing} of {Box.of_shape(one.global_shape).size} values, by up to {largest:g}")
    return Difference(key, "; ".join(words), num_differing, largest) if words else None


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
