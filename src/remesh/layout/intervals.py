"""Intervals of one dim that a holder keeps, and the boxes that several dims make of them.

Definitions. A holder's share of one dim is a list of disjoint intervals of global indices, in the order in
which they lie in the holder's buffer; their concatenation is the *local dim*. An even cut leaves one interval,
a strided or packed one several. The *chunk rule* is torch's: k chunks of ``ceil(n / k)``, the last ones shorter
or empty (never ``tensor_split``, which spreads the rest evenly). A dim of which nothing is left is the empty
interval at its end, as in torch.

The boxes of a holder are the product of the intervals of all dims, and its buffer is row-major over the
product of the local dims.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from remesh.layout.box import Box, row_major_strides

Intervals = tuple[tuple[int, int], ...]
"""Disjoint intervals of one dim, in global indices, in buffer order; never empty as a tuple."""


class LocalBox(NamedTuple):
    """A box that one holder keeps, and where it lies in that holder's row-major buffer."""

    box: Box
    """In global indices; may be empty."""
    offset: int
    """Element of the buffer where the box begins."""
    strides: tuple[int, ...]
    """Elements of the buffer between neighbours in each dim."""


def chunk(length: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Start and stop of one chunk by the rule of ``torch.chunk``; both are ``length`` for an empty one.

    >>> [chunk(10, 4, index) for index in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    chunk_length = -(-length // num_chunks)
    return min(length, chunk_length * index), min(length, chunk_length * (index + 1))


def length_of(intervals: Intervals) -> int:
    """Length of the local dim.

    >>> length_of(((0, 2), (5, 6)))
    3
    """
    return sum(stop - start for start, stop in intervals)


def select(intervals: Intervals, low: int, high: int) -> list[tuple[int, int]]:
    """The part ``low:high`` of the local dim; no empty pieces.

    >>> select(((0, 2), (5, 9)), 1, 4)
    [(1, 2), (5, 7)]
    """
    picked = []
    passed = 0
    for start, stop in intervals:
        first, last = max(low - passed, 0), min(high - passed, stop - start)
        if first < last:
            picked.append((start + first, start + last))
        passed += stop - start
    return picked


def join(pieces: Sequence[tuple[int, int]], size: int) -> Intervals:
    """These pieces with neighbours that touch made one; the empty interval at ``size`` if there are none.

    >>> join([(0, 2), (2, 3), (5, 6)], 8), join([], 8)
    (((0, 3), (5, 6)), ((8, 8),))
    """
    joined: list[tuple[int, int]] = []
    for start, stop in pieces:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined) or ((size, size),)


def product(dims: Sequence[Intervals]) -> tuple[LocalBox, ...]:
    """The boxes of a holder whose dims are these; one empty box if any of them is empty.

    >>> [str(each.box) for each in product((((0, 1), (4, 5)), ((0, 3),)))]
    ['[0:1, 0:3]', '[4:5, 0:3]']
    """
    local_shape = [length_of(intervals) for intervals in dims]
    strides = row_major_strides(local_shape)
    if 0 in local_shape:
        first = [intervals[0] for intervals in dims]
        return (LocalBox(_box(first), 0, strides),)
    found = []
    local_starts = [itertools.accumulate((b - a for a, b in intervals), initial=0) for intervals in dims]
    placed = [list(zip(intervals, starts, strict=False)) for intervals, starts in zip(dims, local_starts, strict=True)]
    for parts in itertools.product(*placed):
        offset = sum(at * stride for (_, at), stride in zip(parts, strides, strict=True))
        found.append(LocalBox(_box([interval for interval, _ in parts]), offset, strides))
    return tuple(found)


def _box(intervals: Sequence[tuple[int, int]]) -> Box:
    return Box(tuple(start for start, _ in intervals), tuple(stop for _, stop in intervals))
