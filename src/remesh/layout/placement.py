"""Pure equivalents of DTensor's placements: the boxes that a rank holds under them.

Definitions. Placements are one per mesh axis, applied from the first axis to the last. ``Split`` cuts what is left of a
dim by torch's *chunk* rule: k chunks of ``ceil(n / k)``, the last ones shorter or empty (never ``tensor_split``, which
spreads the rest evenly). ``StridedSplit`` first cuts into ``split_factor`` chunks, then each of these into k, and joins
the r-th of every chunk: FSDP over a dim that tensor parallelism cuts later. ``Replicate`` gives every rank the same,
``Partial`` every rank an addend.

Algorithm. Per dim, keep the intervals of global indices that a coordinate has left; a split selects a range of
their concatenation, a strided split several ranges (:mod:`remesh.layout.intervals`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from remesh.foundation.errors import LayoutError
from remesh.layout.intervals import Intervals, LocalBox, chunk, join, length_of, product, select
from remesh.layout.layout import Layout
from remesh.layout.mesh import Mesh
from remesh.layout.shard import Shard


@dataclass(frozen=True, slots=True)
class Split:
    """The axis cuts ``dim`` by torch's chunk rule (DTensor's ``Shard``)."""

    dim: int
    """Tensor dim, counted from 0. Invariant: >= 0."""


@dataclass(frozen=True, slots=True)
class StridedSplit:
    """The axis cuts each of ``split_factor`` chunks of ``dim`` (DTensor's ``_StridedShard``)."""

    dim: int
    """Tensor dim, counted from 0. Invariant: >= 0."""
    split_factor: int
    """Number of chunks that are made first. Invariant: >= 1."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds the same."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank along the axis holds one addend."""

    reduce_op: str = "sum"
    """Reduction that joins the addends."""


Placement = Split | StridedSplit | Replicate | Partial


def boxes_at(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[LocalBox, ...]:
    """The boxes of one coordinate of a mesh: one, or several if a strided split scatters them.

    >>> [str(box) for box, _, _ in boxes_at((10, 2), (2, 4), (0, 2), (Split(0), Split(0)))]
    ['[4:5, 0:2]']
    """
    check_placements(global_shape, mesh_shape, placements)
    if len(coordinate) != len(mesh_shape) or any(
        not 0 <= at < size for at, size in zip(coordinate, mesh_shape, strict=True)
    ):
        raise LayoutError(
            f"placing a tensor of shape {tuple(global_shape)}: coordinate {tuple(coordinate)} lies outside the mesh of "
            f"shape {tuple(mesh_shape)}; give one index below the size for each axis"
        )
    dims = range(len(global_shape))
    return product(
        tuple(_intervals(global_shape[dim], _cuts_of(dim, mesh_shape, coordinate, placements)) for dim in dims)
    )


def layout_from_placements(
    global_shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement], dtype: str
) -> Layout:
    """The layout that DTensor gives a tensor of this shape; one placement per mesh axis.

    Ranks that hold nothing have an empty box. With several ``Partial`` axes the addends are numbered row-major
    over them.

    >>> layout = layout_from_placements((5,), Mesh.of({"dp": 4}), (Split(0),), "float32")
    >>> [str(shard.box) for shard in layout.shards]
    ['[0:2]', '[2:4]', '[4:5]', '[5:5]']
    """
    check_placements(global_shape, mesh.shape, placements)
    shape = tuple(global_shape)
    shards: list[Shard] = []
    known: dict[tuple[Intervals, ...], tuple[LocalBox, ...]] = {}
    for rank, coordinate in zip(mesh.world_ranks, itertools.product(*map(range, mesh.shape)), strict=True):
        key = tuple(
            _intervals(size, _cuts_of(dim, mesh.shape, coordinate, placements)) for dim, size in enumerate(shape)
        )
        if key not in known:
            known[key] = product(key)
        addend = addend_at(mesh.shape, coordinate, placements)
        shards += [Shard(rank, box, offset, strides, addend) for box, offset, strides in known[key]]
    return Layout(shape, tuple(shards), dtype, reduce_op_of(placements))


def local_shape_at(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[int, ...]:
    """Shape of the local tensor at one coordinate.

    >>> local_shape_at((10, 2), (2, 4), (0, 2), (Split(0), Split(0)))
    (1, 2)
    """
    return tuple(
        length_of(_intervals(size, _cuts_of(dim, mesh_shape, coordinate, placements)))
        for dim, size in enumerate(global_shape)
    )


def reduce_op_of(placements: Sequence[Placement]) -> str | None:
    """The reduction of the ``Partial`` placements, or None without any; two different ones cannot be joined."""
    ops = sorted({placement.reduce_op for placement in placements if isinstance(placement, Partial)})
    if len(ops) > 1:
        raise LayoutError(
            f"placing a tensor: {len(ops)} different reductions {ops} on the axes of one mesh, expected at most 1; "
            "reduce one of them first"
        )
    return ops[0] if ops else None


def addend_at(mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]) -> int:
    """The addend that a coordinate keeps: its row-major position among the ``Partial`` axes; 0 if there are none."""
    addend = 0
    for size, at, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Partial):
            addend = addend * size + at
    return addend


def check_placements(global_shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> None:
    """Raise LayoutError unless there is one possible placement per mesh axis."""
    if len(placements) != len(mesh_shape):
        raise LayoutError(
            f"placing a tensor of shape {tuple(global_shape)}: {len(placements)} placements {tuple(placements)} for a "
            f"mesh of {len(mesh_shape)} axes {tuple(mesh_shape)}; give one placement per axis"
        )
    for axis, placement in enumerate(placements):
        if isinstance(placement, Split | StridedSplit) and not 0 <= placement.dim < len(global_shape):
            raise LayoutError(
                f"placing a tensor of shape {tuple(global_shape)}: {placement} on axis {axis} names dim "
                f"{placement.dim}, expected 0 to {len(global_shape) - 1}; negative dims are not supported"
            )
        if isinstance(placement, StridedSplit) and placement.split_factor < 1:
            raise LayoutError(
                f"placing a tensor: {placement} on axis {axis}, expected a split factor >= 1; a plain Split has 1"
            )


def _cuts_of(
    dim: int, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[tuple[int, int, int], ...]:
    """The cuts of one dim, in order: ``(split_factor, num_chunks, index)``; a plain split has factor 1."""
    return tuple(
        (placement.split_factor if isinstance(placement, StridedSplit) else 1, size, at)
        for size, at, placement in zip(mesh_shape, coordinate, placements, strict=True)
        if isinstance(placement, Split | StridedSplit) and placement.dim == dim
    )


@lru_cache(maxsize=1 << 16)
def _intervals(size: int, cuts: tuple[tuple[int, int, int], ...]) -> Intervals:
    """The intervals of a dim that remain after these cuts."""
    left: Intervals = ((0, size),)
    for split_factor, num_chunks, index in cuts:
        length = length_of(left)
        picked: list[tuple[int, int]] = []
        for part in range(split_factor):
            low, high = chunk(length, split_factor, part)
            start, stop = chunk(high - low, num_chunks, index)
            picked += select(left, low + start, low + stop)
        left = join(picked, size)
    return left
