"""Overlap of two layouts: the slices that can be transferred, with their givers and takers.

Definitions. A *slice* is a box of the common refinement of two layouts: every element of it has the same
*givers* (shards of the source that contain it) and the same *takers* (shards of the destination). The slices
of an overlap are disjoint and together are everything the destination wants and the source has.

Algorithm. (1) Reduce each side to its atoms: disjoint boxes with the shards that contain them. (2) Find the
pairs of atoms that meet (:mod:`remesh.layout.box_array`); each pair is one slice, its box their intersection.
Since the atoms of each side are disjoint, so are the slices. Replicas cost nothing but their place in a list,
so the work grows with the number of slices and not with the number of pairs of ranks.

Partial sums: the givers of a slice then carry different addends; a transfer of the slice must reduce one giver of each
addend. Source: arXiv 2211.05322, appendix B.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from remesh.foundation.errors import LayoutError
from remesh.layout.atoms import Atoms
from remesh.layout.box import Box
from remesh.layout.box_array import BoxArray, IntArray, find_pairs
from remesh.layout.cover import subtract_all
from remesh.layout.layout import Layout
from remesh.layout.shard import Shard

_SMALL = 4096
"""Pairs of atoms up to which an overlap is worth being found together with others."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One box that the destination wants and the source has."""

    box: Box
    """In global indices. Invariant: not empty, inside the box of every giver and taker."""
    givers: tuple[Shard, ...]
    """Every shard of the source that contains the box. Invariant: at least one."""
    takers: tuple[Shard, ...]
    """Every shard of the destination that contains the box. Invariant: at least one."""


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """All slices of two layouts, as arrays; iterating makes :class:`Slice` values one by one.

    Slices are in row-major order of their first elements.
    """

    src: Atoms
    dst: Atoms
    src_index: IntArray
    """Atom of the source that each slice lies in, ``[num_slices]``."""
    dst_index: IntArray
    """Atom of the destination that each slice lies in, ``[num_slices]``."""
    starts: IntArray
    """First global index of each slice, ``[num_slices, ndim]``."""
    stops: IntArray
    """One past the last global index of each slice, ``[num_slices, ndim]``."""

    def __len__(self) -> int:
        return len(self.src_index)

    def __getitem__(self, index: int) -> Slice:
        box = Box(tuple(self.starts[index].tolist()), tuple(self.stops[index].tolist()))
        return Slice(box, self.src.shards[int(self.src_index[index])], self.dst.shards[int(self.dst_index[index])])

    def __iter__(self) -> Iterator[Slice]:
        rows = zip(
            self.starts.tolist(), self.stops.tolist(), self.src_index.tolist(), self.dst_index.tolist(), strict=True
        )
        for start, stop, src, dst in rows:
            yield Slice(Box(tuple(start), tuple(stop)), self.src.shards[src], self.dst.shards[dst])

    @property
    def sizes(self) -> IntArray:
        """Number of elements of each slice, ``[num_slices]``."""
        return BoxArray(self.starts, self.stops).sizes


def compute_overlap(src: Layout, dst: Layout, name: str = "tensor") -> Overlap:
    """The common refinement of two layouts of one tensor: everything in ``dst`` that ``src`` has.

    >>> whole, halves = Box((0,), (6,)), Box((0,), (6,)).split(0, 4)
    >>> src = Layout((6,), tuple(Shard(rank, box) for rank, box in enumerate(halves)), "int8")
    >>> [str(each.box) for each in compute_overlap(src, Layout((6,), (Shard(7, whole),), "int8"))]
    ['[0:4]', '[4:6]']
    """
    _check_same_tensor(src, dst, name)
    a, b = src.atoms, dst.atoms
    src_index, dst_index = find_pairs(a.boxes, b.boxes)
    # take() is several times faster than indexing with an array when there are many short rows.
    starts = a.boxes.starts.take(src_index, axis=0)
    stops = a.boxes.stops.take(src_index, axis=0)
    np.maximum(starts, b.boxes.starts.take(dst_index, axis=0), out=starts)
    np.minimum(stops, b.boxes.stops.take(dst_index, axis=0), out=stops)
    return Overlap(a, b, src_index, dst_index, starts, stops)


def compute_overlaps(pairs: Sequence[tuple[Layout, Layout, str]]) -> list[Overlap]:
    """The overlap of each pair of source and destination; the names are for errors.

    Small ones are found together: with the number of its pair as one dim more, no box meets one of another pair.
    """
    small = [number for number, (src, dst, _) in enumerate(pairs) if len(src.atoms) * len(dst.atoms) <= _SMALL]
    if len(small) < 2:
        return [compute_overlap(*pair) for pair in pairs]
    for pair in pairs:
        _check_same_tensor(*pair)
    sides = [pairs[number][0].atoms for number in small], [pairs[number][1].atoms for number in small]
    width = max(pairs[number][0].ndim for number in small)
    a, b = (_stack(atoms, width) for atoms in sides)
    index_a, index_b = find_pairs(a, b)
    starts = np.maximum(a.starts.take(index_a, axis=0), b.starts.take(index_b, axis=0))
    stops = np.minimum(a.stops.take(index_a, axis=0), b.stops.take(index_b, axis=0))
    ends = np.searchsorted(starts[:, 0], np.arange(len(small) + 1)).tolist()
    found: dict[int, Overlap] = {}
    first_a = first_b = 0
    for at, (number, src, dst) in enumerate(zip(small, *sides, strict=True)):
        rows, dims = slice(ends[at], ends[at + 1]), slice(1, 1 + pairs[number][0].ndim)
        found[number] = Overlap(
            src, dst, index_a[rows] - first_a, index_b[rows] - first_b, starts[rows, dims], stops[rows, dims]
        )
        first_a += len(src)
        first_b += len(dst)
    return [found[number] if number in found else compute_overlap(*pair) for number, pair in enumerate(pairs)]


def _stack(several: Sequence[Atoms], width: int) -> BoxArray:
    """The boxes of all, padded behind to so many dims, with their number as one dim before."""
    number = np.repeat(np.arange(len(several)), [len(atoms) for atoms in several])[:, None]
    columns = []
    for side, pad in (("starts", 0), ("stops", 1)):
        boxes = [getattr(atoms.boxes, side) for atoms in several]
        rows = [
            np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=pad) if x.shape[1] < width else x
            for x in boxes
        ]
        columns.append(np.concatenate((number + pad, np.concatenate(rows)), axis=1))
    return BoxArray(columns[0], columns[1])


def compute_missing(src: Layout, dst: Layout, name: str = "tensor") -> tuple[Box, ...]:
    """Disjoint boxes that ``dst`` wants and no holder in ``src`` has, in row-major order of start.

    >>> whole = Box((0,), (6,))
    >>> src = Layout((6,), (Shard(0, Box((0,), (4,))),), "int8")
    >>> compute_missing(src, Layout((6,), (Shard(1, whole),), "int8"))
    (Box((4,), (6,)),)
    """
    overlap = compute_overlap(src, dst, name)
    held = np.zeros(len(overlap.dst), dtype=np.int64)
    np.add.at(held, overlap.dst_index, overlap.sizes)
    lacking = np.flatnonzero(held < overlap.dst.boxes.sizes)
    if not len(lacking):
        return ()
    order = np.argsort(overlap.dst_index, kind="stable")
    bounds = np.searchsorted(overlap.dst_index[order], np.stack((lacking, lacking + 1)))
    missing: list[Box] = []
    for atom, low, high in zip(lacking.tolist(), *bounds.tolist(), strict=True):
        missing += subtract_all(overlap.dst.boxes.box(atom), (overlap[i].box for i in order[low:high].tolist()))
    return tuple(sorted(missing))


def _check_same_tensor(src: Layout, dst: Layout, name: str) -> None:
    if src.global_shape != dst.global_shape:
        raise LayoutError(
            f"comparing two layouts of {name!r}: the source has global shape {src.global_shape}, the destination "
            f"{dst.global_shape}, expected equal; both must describe the same tensor"
        )
