"""Sharding specs such as ``S01R``, uneven cuts and packed blocks: how each dim is cut.

Definitions. A spec has one entry per tensor dim: ``R`` keeps the dim whole, ``S`` followed by mesh axes cuts it
over them, the first named axis being the major one. ``S01R`` cuts dim 0 over all ranks of a 2-d mesh; ``S10R``
does too, in the other order. Axes from 10 on are written in brackets: ``S(3,12)``. Axes that no dim uses
replicate. Source: arXiv 2211.05322, section 2.

How a dim is cut into its parts:

- by default by the chunk rule, axis after axis (even whenever the paper's specs are, and equal to DTensor's
  nested shards when the axes ascend);
- *uneven*: by explicit sizes, one per part, the parts numbered with the major axis first;
- *packed*: the dim is several blocks laid end to end (fused QKV, gate and up), each cut for itself by the chunk
  rule; a holder's buffer is the concatenation of its piece of every block.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from remesh.foundation.errors import LayoutError
from remesh.layout.intervals import Intervals, LocalBox, chunk, join, product
from remesh.layout.layout import Layout
from remesh.layout.mesh import Mesh
from remesh.layout.shard import Shard

_REMEMBERED = 16
"""Kinds of tensors whose boxes are kept: a layer of a model has about as many."""
_ENTRY = re.compile(r"R|S(\d+|\(\d{1,4}(?:,\d{1,4})*\))", re.ASCII)


@dataclass(frozen=True, slots=True)
class Spec:
    """The mesh axes that shard each dim.

    >>> Spec(((0, 1), ())), str(Spec(((0, 1), ())))
    (Spec(dims=((0, 1), ())), 'S01R')
    """

    dims: tuple[tuple[int, ...], ...]
    """Per tensor dim: its mesh axes, major first; empty keeps the dim whole. Invariant: no axis twice, all >= 0."""

    def __post_init__(self) -> None:
        axes = [axis for dim in self.dims for axis in dim]
        if len(set(axes)) != len(axes) or any(axis < 0 for axis in axes):
            raise LayoutError(
                f"making a sharding spec of axes {self.dims}: expected every axis at most once and >= 0; a mesh axis "
                "can cut only one dim"
            )

    def __str__(self) -> str:
        return "".join(_entry_text(axes) for axes in self.dims)


@dataclass(frozen=True, slots=True)
class Packed:
    """A dim that is several blocks laid end to end, each sharded for itself."""

    dim: int
    """Tensor dim, counted from 0."""
    sizes: tuple[int, ...]
    """Length of each block, in order. Invariant: >= 0; they add up to the size of the dim."""


def parse_spec(text: str) -> Spec:
    """The spec that a string such as ``"S01RR"`` means.

    >>> parse_spec("RS1R").dims
    ((), (1,), ())
    """
    dims: list[tuple[int, ...]] = []
    at = 0
    while at < len(text):
        found = _ENTRY.match(text, at)
        if found is None:
            raise LayoutError(
                f"reading sharding spec {text[:80]!r}: found {text[at]!r} at position {at}, expected R, or S followed "
                "by mesh axes (S0, S01, S(3,12)); one entry per tensor dim"
            )
        axes = found[1]
        if axes is None:
            dims.append(())
        elif axes.startswith("("):
            dims.append(tuple(int(axis) for axis in axes[1:-1].split(",")))
        else:
            dims.append(tuple(int(axis) for axis in axes))
        at = found.end()
    return Spec(tuple(dims))


def layout_from_spec(
    spec: str | Spec,
    global_shape: Sequence[int],
    mesh: Mesh,
    dtype: str,
    *,
    uneven: Mapping[int, Sequence[int]] | None = None,
    packed: Sequence[Packed] = (),
) -> Layout:
    """The layout that a spec gives a tensor of this shape.

    ``uneven`` maps a dim to the size of each of its parts, as many as the product of its axes; ``packed`` lists
    the dims that are made of blocks.

    >>> layout = layout_from_spec("S0", (5,), Mesh.of({"tp": 2}), "int8", uneven={0: (1, 4)})
    >>> [str(shard.box) for shard in layout.shards]
    ['[0:1]', '[1:5]']
    """
    shape = tuple(global_shape)
    spec = parse_spec(spec) if isinstance(spec, str) else spec
    _check_fits(spec, shape, mesh)
    explicit = dict(uneven or {})
    blocks = {each.dim: each.sizes for each in packed}
    _check_cuts(spec, shape, mesh, explicit, blocks, len(packed))
    cuts = tuple(
        (tuple(explicit[dim]) if dim in explicit else None, tuple(blocks.get(dim, (size,))))
        for dim, size in enumerate(shape)
    )
    shards = tuple(
        Shard(rank, box, offset, strides)
        for rank, boxes in zip(mesh.world_ranks, _boxes_by_rank(spec, shape, tuple(mesh.shape), cuts), strict=True)
        for box, offset, strides in boxes
    )
    return Layout(shape, shards, dtype)


_Cuts = tuple[tuple[tuple[int, ...] | None, tuple[int, ...]], ...]
"""Per dim: explicit sizes of its parts, if any, and the blocks that it consists of."""


@lru_cache(maxsize=_REMEMBERED)
def _boxes_by_rank(
    spec: Spec, shape: tuple[int, ...], mesh_shape: tuple[int, ...], cuts: _Cuts
) -> tuple[tuple[LocalBox, ...], ...]:
    """The boxes at every coordinate of a mesh, row-major. Meshes of one shape, such as stages, share them."""
    shares = [
        _shares_of_dim(size, [mesh_shape[axis] for axis in axes], explicit, blocks)
        for size, axes, (explicit, blocks) in zip(shape, spec.dims, cuts, strict=True)
    ]
    known: dict[tuple[int, ...], tuple[LocalBox, ...]] = {}
    found = []
    for coordinate in itertools.product(*map(range, mesh_shape)):
        parts = tuple(_part_number(axes, mesh_shape, coordinate) for axes in spec.dims)
        if parts not in known:
            known[parts] = product([share[part] for share, part in zip(shares, parts, strict=True)])
        found.append(known[parts])
    return tuple(found)


def _shares_of_dim(
    size: int, axis_sizes: Sequence[int], explicit: Sequence[int] | None, blocks: Sequence[int]
) -> list[Intervals]:
    """Per part of one dim, major axis first: its intervals of global indices."""
    if explicit is not None:
        ends = list(itertools.accumulate(explicit))
        return [
            ((end - length, end),) if length else ((size, size),) for end, length in zip(ends, explicit, strict=True)
        ]
    shares = []
    for coordinate in itertools.product(*map(range, axis_sizes)):
        pieces = []
        block_start = 0
        for block in blocks:
            start, stop = block_start, block_start + block
            for num_chunks, index in zip(axis_sizes, coordinate, strict=True):
                low, high = chunk(stop - start, num_chunks, index)
                start, stop = start + low, start + high
            if start < stop:
                pieces.append((start, stop))
            block_start += block
        shares.append(join(pieces, size))
    return shares


def _part_number(axes: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int]) -> int:
    part = 0
    for axis in axes:
        part = part * mesh_shape[axis] + coordinate[axis]
    return part


def _check_fits(spec: Spec, shape: tuple[int, ...], mesh: Mesh) -> None:
    if len(spec.dims) != len(shape):
        raise LayoutError(
            f"applying sharding spec {spec}: it has {len(spec.dims)} dims, the tensor of shape {shape} has "
            f"{len(shape)}; give one entry (R or S...) per dim"
        )
    highest = max((axis for axes in spec.dims for axis in axes), default=-1)
    if highest >= mesh.ndim:
        raise LayoutError(
            f"applying sharding spec {spec}: it names mesh axis {highest}, the mesh {mesh} has {mesh.ndim} axes, "
            f"expected at most axis {mesh.ndim - 1}; use an axis that is there"
        )


def _check_cuts(
    spec: Spec,
    shape: tuple[int, ...],
    mesh: Mesh,
    uneven: Mapping[int, Sequence[int]],
    blocks: Mapping[int, Sequence[int]],
    num_packed: int,
) -> None:
    if len(blocks) != num_packed or set(uneven) & set(blocks):
        raise LayoutError(
            f"applying sharding spec {spec}: uneven dims {sorted(uneven)}, packed dims {sorted(blocks)} in "
            f"{num_packed} entries; expected each dim in at most one of them"
        )
    for what, dim, sizes in (
        *(("uneven", *item) for item in uneven.items()),
        *(("packed", *i) for i in blocks.items()),
    ):
        if not 0 <= dim < len(shape):
            raise LayoutError(
                f"applying sharding spec {spec}: {what} dim {dim}, expected 0 to {len(shape) - 1}; negative dims are "
                "not supported"
            )
        if sum(sizes) != shape[dim] or any(size < 0 for size in sizes):
            raise LayoutError(
                f"applying sharding spec {spec}: {what} sizes {tuple(sizes)} of dim {dim} add up to {sum(sizes)}, "
                f"expected {shape[dim]} from sizes >= 0; list every part once"
            )
        num_parts = math.prod(mesh.shape[axis] for axis in spec.dims[dim])
        if what == "uneven" and len(sizes) != num_parts:
            raise LayoutError(
                f"applying sharding spec {spec}: dim {dim} has {len(sizes)} uneven sizes {tuple(sizes)}, expected "
                f"{num_parts}; give one for each part that its axes {spec.dims[dim]} make"
            )


def _entry_text(axes: tuple[int, ...]) -> str:
    if not axes:
        return "R"
    return "S" + ("".join(map(str, axes)) if max(axes) < 10 else f"({','.join(map(str, axes))})")
