"""Arrays of boxes, and the pairs of them that overlap.

Definitions. A *box array* is ``starts`` and ``stops``, both ``[num_boxes, ndim]``. A set of boxes is a *grid*
when in every dim its distinct intervals are disjoint, so that each box is a cell of their product. Regular
shardings, even or uneven, are grids; flat ranges and unions of layouts are not.

Algorithm of :func:`find_pairs`, by what the two sides look like:

1. Few boxes: compare all with all.
2. Both are grids: join the sorted intervals of each dim by binary search; the pairs are the cartesian product
   of the joins, in row-major order. The work is the size of the answer.
3. Otherwise: count for each dim how many pairs its intervals alone would give (two binary searches per box),
   take the dim with the fewest, list these candidates and keep those which meet in all other dims too.

Nothing is quadratic in the number of boxes unless the answer is, or the boxes overlap in every single dim.
Source: arXiv 2211.05322, appendix B.2 (cut points of every dim and their product).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remesh.foundation.errors import LayoutError
from remesh.layout.box import Box

IntArray = npt.NDArray[np.int64]

_ALL_WITH_ALL = 4096
"""Up to this many comparisons the set-up of the other paths costs more than they save."""
_GRID_SLACK = 4
"""A grid may have this many times more cells than boxes before its table is thought a waste."""
_CANDIDATES_AT_ONCE = 1 << 22
"""Bounds the memory of the sweep: candidates are listed and filtered in blocks of about this many."""


@dataclass(frozen=True, slots=True, eq=False)
class BoxArray:
    """Boxes as two integer matrices; rows are boxes, columns dims."""

    starts: IntArray
    """First global index, ``[num_boxes, ndim]``."""
    stops: IntArray
    """One past the last global index, ``[num_boxes, ndim]``. Invariant: > ``starts`` (no empty box)."""

    @classmethod
    def of(cls, boxes: Sequence[Box], ndim: int) -> BoxArray:
        """The array of these boxes, none of them empty, in their order."""
        try:
            starts = np.array([box.start for box in boxes], dtype=np.int64).reshape(len(boxes), ndim)
            stops = np.array([box.stop for box in boxes], dtype=np.int64).reshape(len(boxes), ndim)
        except OverflowError as error:
            raise LayoutError(
                f"making an array of {len(boxes)} boxes: some coordinate is beyond {2**63 - 1}, the largest index; "
                "correct the box"
            ) from error
        if (starts >= stops).any():
            raise LayoutError("making an array of boxes: some box is empty; drop empty boxes, they share nothing")
        return cls(starts, stops)

    def __len__(self) -> int:
        return int(self.starts.shape[0])

    @property
    def ndim(self) -> int:
        return int(self.starts.shape[1])

    @property
    def sizes(self) -> IntArray:
        """Number of elements of each box, ``[num_boxes]``."""
        # Column by column: reducing many short rows takes several times as long.
        sizes = np.ones(len(self), dtype=np.int64)
        for dim in range(self.ndim):
            sizes *= self.stops[:, dim] - self.starts[:, dim]
        return sizes

    def box(self, index: int) -> Box:
        """Box number ``index``."""
        return Box(tuple(self.starts[index].tolist()), tuple(self.stops[index].tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """Boxes that are cells of a product of disjoint intervals."""

    starts: tuple[IntArray, ...]
    """Per dim: the distinct interval starts, ascending."""
    stops: tuple[IntArray, ...]
    """Per dim: the stop that belongs to each of ``starts``. Invariant: stops[i] <= starts[i + 1]."""
    table: IntArray
    """Box number of each cell, row-major; -1 where no box is."""
    is_full: bool
    """Whether every cell has a box."""


def find_pairs(a: BoxArray, b: BoxArray) -> tuple[IntArray, IntArray]:
    """Every pair of boxes that share elements, as two index arrays ``[num_pairs]`` into ``a`` and ``b``.

    Ordered by the start of the shared box, row-major; ties (possible only when one side overlaps itself) by
    index in ``a``, then in ``b``.
    """
    if len(a) * len(b) <= _ALL_WITH_ALL or a.ndim == 0:
        index_a, index_b = _pairs_all_with_all(a, b)
        return _in_row_major_order(a, b, index_a, index_b)
    grid_a = _grid_of(a)
    grid_b = None if grid_a is None else _grid_of(b)
    if grid_a is not None and grid_b is not None:
        return _pairs_of_grids(grid_a, grid_b)
    index_a, index_b = _pairs_by_sweep(a, b)
    return _in_row_major_order(a, b, index_a, index_b)


@dataclass(frozen=True, slots=True, eq=False)
class GridJoin:
    """The overlap of two full grids, without a list of their pairs."""

    num_pairs: int
    """Pairs of boxes that share elements."""
    met: IntArray
    """For each box of the second grid how many of the first share elements with it."""
    largest: int
    """Elements that a pair shares at the most."""


def join_grids(a: BoxArray, b: BoxArray) -> GridJoin | None:
    """How two grids meet, in time that grows with their boxes alone; None unless both are grids without a hole.

    >>> rows, columns = (BoxArray.of(Box.of_shape((4, 6)).split(dim, 2), 2) for dim in (0, 1))
    >>> join_grids(rows, columns)
    GridJoin(num_pairs=4, met=array([2, 2]), largest=8)
    """
    grids = _grid_of(a), _grid_of(b)
    if grids[0] is None or grids[1] is None or not (grids[0].is_full and grids[1].is_full):
        return None
    cells, largest = np.ones(1, dtype=np.int64), 1
    for starts_a, stops_a, starts_b, stops_b in zip(
        grids[0].starts, grids[0].stops, grids[1].starts, grids[1].stops, strict=True
    ):
        low, count = _neighbours(starts_b, stops_b, starts_a, stops_a)
        at_b, at_a = _expand(low, count)
        shared = np.minimum(stops_a[at_a], stops_b[at_b]) - np.maximum(starts_a[at_a], starts_b[at_b])
        largest *= int(shared.max(initial=0))
        cells = (cells[:, None] * count[None, :]).reshape(-1)
    met = np.empty_like(cells)
    met[grids[1].table] = cells
    return GridJoin(int(cells.sum()), met, largest)


def sum_over_boxes(boxes: BoxArray, tiles: BoxArray, values: IntArray) -> IntArray:
    """For each box what its elements add up to, each counted with the value of the tile that it lies in.

    Both are grids without a hole, and tiles leave nothing out; see `join_grids`. The time grows with the two together.

    >>> rows, columns = (BoxArray.of(Box.of_shape((4, 6)).split(dim, 2), 2) for dim in (0, 1))
    >>> sum_over_boxes(rows, columns, np.array([1, 10])).tolist()
    [84, 84]
    """
    grid, tiling = _grid_of(boxes), _grid_of(tiles)
    assert grid is not None and tiling is not None and grid.is_full and tiling.is_full
    table = values[tiling.table].reshape([len(starts) for starts in tiling.starts])
    # Dims in which boxes are long go first, so that the table is never larger than it has to be.
    for dim in sorted(range(boxes.ndim), key=lambda dim: len(grid.starts[dim]) / len(tiling.starts[dim])):
        rows, starts, stops = np.moveaxis(table, dim, -1), tiling.starts[dim], tiling.stops[dim]
        before = np.cumsum(rows * (stops - starts), axis=-1) - rows * (stops - starts)
        low, high = (
            before[..., at] + rows[..., at] * (ends - starts[at])
            for ends in (grid.starts[dim], grid.stops[dim])
            for at in [np.searchsorted(stops, ends).clip(max=len(stops) - 1)]
        )
        table = np.moveaxis(high - low, -1, dim)
    sums = np.empty(len(boxes), dtype=np.int64)
    sums[grid.table] = table.reshape(-1)
    return sums


def is_disjoint(boxes: BoxArray) -> bool:
    """Whether no two of these boxes share an element; two equal boxes do."""
    if len(boxes) * len(boxes) > _ALL_WITH_ALL:
        grid = _grid_of(boxes)
        if grid is not None:
            return int(np.count_nonzero(grid.table >= 0)) == len(boxes)
        return len(_pairs_by_sweep(boxes, boxes)[0]) == len(boxes)
    return len(_pairs_all_with_all(boxes, boxes)[0]) == len(boxes)


def _pairs_all_with_all(a: BoxArray, b: BoxArray) -> tuple[IntArray, IntArray]:
    """The dumb twin of the other two paths: one comparison per pair and dim."""
    meets = (a.starts[:, None, :] < b.stops[None, :, :]) & (b.starts[None, :, :] < a.stops[:, None, :])
    index_a, index_b = np.nonzero(meets.all(axis=2))
    return index_a, index_b


def _grid_of(boxes: BoxArray) -> _Grid | None:
    """The grid whose cells these boxes are, or None if they are none or would leave it nearly empty."""
    starts, stops, places = [], [], []
    num_cells = 1
    for dim in range(boxes.ndim):
        dim_starts, dim_stops, place = _intervals_of(boxes.starts[:, dim], boxes.stops[:, dim])
        num_cells *= len(dim_starts)
        if num_cells > _GRID_SLACK * len(boxes) or (dim_stops[:-1] > dim_starts[1:]).any():
            return None
        if (dim_stops[place] != boxes.stops[:, dim]).any():
            return None
        starts.append(dim_starts)
        stops.append(dim_stops)
        places.append(place)
    table = np.full(num_cells, -1, dtype=np.int64)
    cells = np.zeros(len(boxes), dtype=np.int64)
    for dim_starts, place in zip(starts, places, strict=True):
        cells = cells * len(dim_starts) + place
    table[cells] = np.arange(len(boxes))
    return _Grid(tuple(starts), tuple(stops), table, bool((table >= 0).all()))


def _intervals_of(starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Distinct starts, ascending; a stop that belongs to each; and the place of each given start among them."""
    extent = int(starts.max(initial=0)) + 1
    if extent > _GRID_SLACK * len(starts):
        # numpy.unique would do, but its first call imports numpy.ma, which takes longer than a small plan.
        order = np.argsort(starts, kind="stable")
        is_first = np.diff(starts[order], prepend=-1) > 0
        place = np.empty_like(order)
        place[order] = np.cumsum(is_first) - 1
        first = order[is_first]
        return starts[first], stops[first], place
    # Counting beats sorting when there are more boxes than places where they could begin.
    stop_of = np.zeros(extent, dtype=np.int64)
    stop_of[starts] = stops
    found = np.flatnonzero(stop_of)
    places = np.empty(extent, dtype=np.int64)
    places[found] = np.arange(len(found))
    return found, stop_of[found], places.take(starts)


def _pairs_of_grids(a: _Grid, b: _Grid) -> tuple[IntArray, IntArray]:
    cells_a = np.zeros(1, dtype=np.int64)
    cells_b = np.zeros(1, dtype=np.int64)
    for starts_a, stops_a, starts_b, stops_b in zip(a.starts, a.stops, b.starts, b.stops, strict=True):
        at_a, at_b = _expand(*_neighbours(starts_a, stops_a, starts_b, stops_b))
        cells_a = (cells_a[:, None] * len(starts_a) + at_a[None, :]).reshape(-1)
        cells_b = (cells_b[:, None] * len(starts_b) + at_b[None, :]).reshape(-1)
    index_a = a.table.take(cells_a)
    index_b = b.table.take(cells_b)
    if a.is_full and b.is_full:
        return index_a, index_b
    both = (index_a >= 0) & (index_b >= 0)
    return index_a[both], index_b[both]


def _neighbours(
    starts_a: IntArray, stops_a: IntArray, starts_b: IntArray, stops_b: IntArray
) -> tuple[IntArray, IntArray]:
    """The start and number of the intervals of b that meet each interval of a; both are sorted and disjoint."""
    low = np.searchsorted(stops_b, starts_a, side="right")
    high = np.searchsorted(starts_b, stops_a, side="left")
    return low, np.maximum(high - low, 0)


def _pairs_by_sweep(a: BoxArray, b: BoxArray) -> tuple[IntArray, IntArray]:
    """Pairs in the most selective dim, then filtered by the others.

    Two intervals meet exactly when one of them begins inside the other; a pair that begins together is
    counted with ``a`` only, so no pair comes twice.
    """
    joins = [_IntervalJoin.of(a, b, dim) for dim in range(a.ndim)]
    join = min(joins, key=lambda each: each.num_pairs)
    found_a, found_b = [], []
    for low, count, order, b_first in (
        (join.low_b, join.count_b, join.order_b, False),
        (join.low_a, join.count_a, join.order_a, True),
    ):
        for begin, end in _blocks(count):
            outer, inner = _expand(low[begin:end], count[begin:end])
            outer += begin
            inner = order.take(inner)
            index_a, index_b = (inner, outer) if b_first else (outer, inner)
            keep = np.ones(len(index_a), dtype=bool)
            for dim in range(a.ndim):
                if dim != join.dim:
                    keep &= a.starts[:, dim].take(index_a) < b.stops[:, dim].take(index_b)
                    keep &= b.starts[:, dim].take(index_b) < a.stops[:, dim].take(index_a)
            found_a.append(index_a[keep])
            found_b.append(index_b[keep])
    return np.concatenate(found_a), np.concatenate(found_b)


@dataclass(frozen=True, slots=True, eq=False)
class _IntervalJoin:
    """The intervals of one side that begin inside those of the other, in one dim, as ranges of a sorted order."""

    dim: int
    order_a: IntArray
    order_b: IntArray
    low_b: IntArray
    """Per box of a: position in ``order_b`` of the first b that begins inside it (not before it)."""
    count_b: IntArray
    low_a: IntArray
    """Per box of b: position in ``order_a`` of the first a that begins strictly inside it."""
    count_a: IntArray

    @classmethod
    def of(cls, a: BoxArray, b: BoxArray, dim: int) -> _IntervalJoin:
        start_a, stop_a, start_b, stop_b = a.starts[:, dim], a.stops[:, dim], b.starts[:, dim], b.stops[:, dim]
        order_a = np.argsort(start_a, kind="stable")
        order_b = np.argsort(start_b, kind="stable")
        sorted_a, sorted_b = start_a[order_a], start_b[order_b]
        low_b = np.searchsorted(sorted_b, start_a, side="left")
        count_b = np.searchsorted(sorted_b, stop_a, side="left") - low_b
        low_a = np.searchsorted(sorted_a, start_b, side="right")
        count_a = np.searchsorted(sorted_a, stop_b, side="left") - low_a
        return cls(dim, order_a, order_b, low_b, count_b, low_a, np.maximum(count_a, 0))

    @property
    def num_pairs(self) -> int:
        return int(self.count_a.sum() + self.count_b.sum())


def _expand(low: IntArray, count: IntArray) -> tuple[IntArray, IntArray]:
    """Row number and member of each range ``low[i] .. low[i] + count[i]``, one after the other."""
    rows = np.repeat(np.arange(len(count)), count)
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    members = np.arange(total) + np.repeat(low - (ends - count), count)
    return rows, members


def _blocks(count: IntArray) -> list[tuple[int, int]]:
    """Ranges of rows with about ``_CANDIDATES_AT_ONCE`` members each."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    marks = np.arange(_CANDIDATES_AT_ONCE, total, _CANDIDATES_AT_ONCE)
    cuts = sorted({0, len(count), *(np.searchsorted(ends, marks, side="left") + 1).tolist()})
    return list(itertools.pairwise(cuts))


def _in_row_major_order(a: BoxArray, b: BoxArray, index_a: IntArray, index_b: IntArray) -> tuple[IntArray, IntArray]:
    if len(index_a) < 2:
        return index_a, index_b
    starts = np.maximum(a.starts.take(index_a, axis=0), b.starts.take(index_b, axis=0))
    extents = (starts.max(axis=0) + 1).tolist()
    if math.prod(extents) < 2**62:
        # One integer per start compares like the row of starts and sorts much faster.
        keys = np.zeros(len(starts), dtype=np.int64)
        for dim, extent in enumerate(extents):
            keys = keys * extent + starts[:, dim]
        if (keys[1:] > keys[:-1]).all():
            return index_a, index_b
        order = np.lexsort((index_b, index_a, keys))
    else:
        order = np.lexsort((index_b, index_a, *starts.T[::-1]))
    return index_a[order], index_b[order]
