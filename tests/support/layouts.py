"""Hypothesis strategies that draw layouts, and brute-force oracles of the layout algebra.

The strategies draw small tensors (at most a few hundred elements) cut in every way the layout package knows:
placements, specs, uneven and packed cuts, flat ranges, arbitrary boxes and unions. The oracles do by brute force,
element by element, what the package does by arithmetic on boxes; they are for small tensors only.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from remesh.layout import (
    Box,
    Holder,
    Layout,
    Mesh,
    Overlap,
    Packed,
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    Split,
    StridedSplit,
    boxes_of_flat_range,
    layout_from_placements,
    layout_from_spec,
)

Index = tuple[int, ...]


def indices_of(box: Box) -> list[Index]:
    """Every global index in the box, row-major."""
    return list(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


def shards_at(layout: Layout) -> dict[Index, frozenset[Shard]]:
    """Oracle: for every index that anyone holds, all shards that contain it."""
    found: dict[Index, set[Shard]] = {}
    for shard in layout.shards:
        for index in indices_of(shard.box):
            found.setdefault(index, set()).add(shard)
    return {index: frozenset(shards) for index, shards in found.items()}


def overlap_by_index(src: Layout, dst: Layout) -> dict[Index, tuple[frozenset[Shard], frozenset[Shard]]]:
    """Oracle of ``compute_overlap``: for every index that both sides hold, its givers and takers."""
    givers, takers = shards_at(src), shards_at(dst)
    return {index: (givers[index], takers[index]) for index in givers.keys() & takers.keys()}


def unfold(overlap: Overlap) -> dict[Index, tuple[frozenset[Shard], frozenset[Shard]]]:
    """The slices of an overlap, index by index; fails if an index comes twice."""
    found: dict[Index, tuple[frozenset[Shard], frozenset[Shard]]] = {}
    for each in overlap:
        for index in indices_of(each.box):
            assert index not in found, f"index {index} lies in two slices"
            found[index] = (frozenset(each.givers), frozenset(each.takers))
    return found


def missing_by_index(src: Layout, dst: Layout) -> set[Index]:
    """Oracle of ``compute_missing``: every index that the destination wants and the source lacks."""
    return set(shards_at(dst)) - set(shards_at(src))


def element_of(shard: Shard, index: Index) -> int:
    """Element of the holder's buffer where a global index lies."""
    assert shard.strides is not None
    return shard.offset + sum(
        (at - start) * stride for at, start, stride in zip(index, shard.box.start, shard.strides, strict=True)
    )


def scatter_array(layout: Layout, whole: npt.NDArray[Any]) -> dict[Holder, npt.NDArray[Any]]:
    """What every holder's flat buffer contains when the whole tensor is ``whole`` (not for partial layouts)."""
    buffers: dict[Holder, npt.NDArray[Any]] = {}
    for holder in layout.holders:
        placed = [(element_of(s, index), index) for s in layout.shards_of(holder) for index in indices_of(s.box)]
        buffer = np.zeros(1 + max((element for element, _ in placed), default=-1), dtype=whole.dtype)
        for element, index in placed:
            buffer[element] = whole[index]
        buffers[holder] = buffer
    return buffers


def gather_array(layout: Layout, buffers: Mapping[Holder, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The whole tensor that these buffers make; fails if replicas differ. Unheld elements are 0."""
    dtype = next(iter(buffers.values())).dtype if buffers else np.dtype(np.int64)
    whole = np.zeros(layout.global_shape, dtype=dtype)
    for index, shards in shards_at(layout).items():
        values = {buffers[shard.holder][element_of(shard, index)].item() for shard in shards}
        assert len(values) == 1, f"replicas of index {index} differ: {values}"
        whole[index] = values.pop()
    return whole


def shapes(max_ndim: int = 3, max_size: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Tensor shapes, 0-d and empty dims included."""
    return st.lists(st.integers(0, max_size), max_size=max_ndim).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, inside: Box) -> Box:
    """Boxes within another, empty ones included."""
    corners = [sorted(draw(st.tuples(st.integers(a, b), st.integers(a, b)))) for a, b in _sides(inside)]
    return Box(tuple(low for low, _ in corners), tuple(high for _, high in corners))


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 3, max_size: int = 4) -> Mesh:
    """Meshes of at most 16 ranks, in any numbering, on one to three hosts."""
    sizes: list[int] = []
    for size in draw(st.lists(st.integers(1, max_size), max_size=max_axes)):
        if np.prod([*sizes, size]) <= 16:
            sizes.append(size)
    num_ranks = int(np.prod(sizes))
    ranks = draw(st.permutations(range(num_ranks)))
    first = draw(st.integers(0, 3))
    hosts = draw(st.lists(st.sampled_from(["h0", "h1", "h2"]), min_size=num_ranks, max_size=num_ranks))
    return Mesh.of({f"x{i}": size for i, size in enumerate(sizes)}, [first + rank for rank in ranks], hosts)


def placements(ndim: int, *, partial: bool = False) -> st.SearchStrategy[Placement]:
    """One placement for a tensor with this many dims."""
    choices: list[st.SearchStrategy[Placement]] = [st.just(Replicate())]
    if ndim:
        choices.append(st.builds(Split, st.integers(0, ndim - 1)))
        choices.append(st.builds(StridedSplit, st.integers(0, ndim - 1), st.integers(1, 4)))
    if partial:
        choices.append(st.just(Partial("sum")))
    return st.one_of(choices)


@st.composite
def placed_layouts(draw: st.DrawFn, shape: tuple[int, ...], *, partial: bool = False) -> Layout:
    """Layouts of DTensor placements; complete and disjoint."""
    mesh = draw(meshes())
    each = placements(len(shape), partial=partial)
    return layout_from_placements(shape, mesh, [draw(each) for _ in mesh.shape], "int32")


@st.composite
def specs(draw: st.DrawFn, ndim: int, num_axes: int) -> Spec:
    """Specs for a tensor with this many dims over a mesh with this many axes."""
    dims: list[list[int]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(range(num_axes))):
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            dims[dim].append(axis)
    return Spec(tuple(map(tuple, dims)))


@st.composite
def spec_layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """Layouts of specs, with some dims cut unevenly or packed; complete and disjoint."""
    mesh = draw(meshes())
    spec = draw(specs(len(shape), mesh.ndim))
    uneven, packed = {}, []
    for dim, (size, axes) in enumerate(zip(shape, spec.dims, strict=True)):
        how = draw(st.sampled_from(["chunks", "uneven", "packed"]))
        if how == "uneven":
            uneven[dim] = draw(compositions(size, int(np.prod([mesh.shape[axis] for axis in axes], dtype=int))))
        elif how == "packed":
            packed.append(Packed(dim, draw(compositions(size, draw(st.integers(1, 3))))))
    return layout_from_spec(spec, shape, mesh, "int32", uneven=uneven, packed=packed)


@st.composite
def flat_layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """Layouts of consecutive flat ranges; complete and disjoint."""
    lengths = draw(compositions(Box.of_shape(shape).size, draw(st.integers(1, 5))))
    stops = list(itertools.accumulate(lengths))
    shards: list[Shard] = []
    for rank, (length, stop) in enumerate(zip(lengths, stops, strict=True)):
        shards += shards_of_flat_range(rank, Box.of_shape(shape), (stop - length, stop), rank)
    return Layout(shape, tuple(shards), "int32")


def shards_of_flat_range(rank: int, box: Box, flat: tuple[int, int], buffer_start: int = 0) -> list[Shard]:
    """A range of a flattened box, as its holder keeps it: one box after the other."""
    shards = []
    for part in boxes_of_flat_range(box, *flat):
        shards.append(Shard(rank, part, buffer_start))
        buffer_start += part.size
    return shards


@st.composite
def arbitrary_layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """Any boxes with any holders: incomplete, overlapping, repeated, empty."""
    whole = Box.of_shape(shape)
    holders: st.SearchStrategy[Holder] = st.one_of(st.integers(0, 4), st.sampled_from(["file:a", "snapshot:1"]))
    shards = st.builds(Shard, holders, boxes(whole), st.integers(0, 3))
    return Layout(shape, tuple(draw(st.lists(shards, max_size=6))), "int32")


def complete_layouts(shape: tuple[int, ...]) -> st.SearchStrategy[Layout]:
    """Layouts that hold every element, by disjoint boxes and their replicas."""
    return st.one_of(placed_layouts(shape), spec_layouts(shape), flat_layouts(shape))


def layouts(shape: tuple[int, ...]) -> st.SearchStrategy[Layout]:
    """Layouts of every kind, unions of two included."""
    one = st.one_of(complete_layouts(shape), arbitrary_layouts(shape))
    return st.one_of(one, st.builds(Layout.merge, one, one))


@st.composite
def compositions(draw: st.DrawFn, total: int, num_parts: int) -> tuple[int, ...]:
    """``num_parts`` sizes >= 0 that add up to ``total``."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=num_parts - 1, max_size=num_parts - 1)))
    return tuple(b - a for a, b in itertools.pairwise([0, *cuts, total]))


def _sides(box: Box) -> list[tuple[int, int]]:
    return list(zip(box.start, box.stop, strict=True))
