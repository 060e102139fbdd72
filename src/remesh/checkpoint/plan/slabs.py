"""Contiguous runs of a row-major chunk that cover a wanted box (slabs), planned without touching a file.

Definitions. A *slab* is a part of the box together with the smallest run of the chunk's elements that covers it. What
of the run lies outside the part is read in vain.

Algorithm. A box whose cover is short enough is one slab. Otherwise it is cut in its first dim of more than one index:

1. where two neighbouring indices leave a gap that is longer than reading it is worth, into single indices;
2. else into bands of as many indices as a slab may cover.

Gaps do not grow inwards, so a band that is one slab wastes at most one such gap for each run of wanted elements.

A box whose runs are all alike and far apart, such as some columns of a matrix, needs no slabs: `find_runs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remesh.layout import Box, row_major_strides


@dataclass(frozen=True, slots=True)
class Slab:
    """A part of a wanted box and the run that covers it."""

    box: Box
    """In indices of the chunk."""
    start: int
    """Row-major number of its first element in the chunk."""
    stop: int
    """One past that of its last element."""

    @property
    def is_run(self) -> bool:
        """Whether the run holds nothing else."""
        return self.stop - self.start == self.box.size


def plan_slabs(chunk_shape: tuple[int, ...], box: Box, max_elements: int, max_gap: int) -> Iterator[Slab]:
    """Disjoint slabs that make up ``box``, in order of their place; each covers at most ``max_elements``, if it can.

    >>> [(str(slab.box), slab.start, slab.stop) for slab in plan_slabs((4, 8), Box((1, 0), (3, 2)), 100, 4)]
    [('[1:2, 0:2]', 8, 10), ('[2:3, 0:2]', 16, 18)]
    """
    if not box.is_empty:
        yield from _cut(row_major_strides(chunk_shape), box, max_elements, max_gap)


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a box, all of one length, in row-major order."""

    starts: npt.NDArray[np.int64]
    """Row-major number of the first element of each in the chunk."""
    length: int
    """In elements."""
    gap: int
    """Unwanted elements between neighbours, where there are fewest."""


def find_runs(chunk_shape: tuple[int, ...], box: Box) -> Runs:
    """The longest runs of elements that make up a box with elements.

    >>> runs = find_runs((4, 8), Box((1, 2), (3, 4)))
    >>> runs.starts.tolist(), runs.length, runs.gap
    ([10, 18], 2, 6)
    """
    strides = row_major_strides(chunk_shape)
    num_outer = len(chunk_shape)
    while num_outer and (num_outer == len(chunk_shape) or box.shape[num_outer] == chunk_shape[num_outer]):
        num_outer -= 1
    starts = np.zeros(1, np.int64)
    for dim, stride in enumerate(strides):
        indices = np.arange(box.shape[dim] if dim < num_outer else 1) + box.start[dim]
        starts = (starts[:, None] + indices * stride).reshape(-1)
    length = math.prod(box.shape[num_outer:])
    return Runs(starts, length, int(np.diff(starts).min()) - length if len(starts) > 1 else 0)


def _cut(strides: tuple[int, ...], box: Box, max_elements: int, max_gap: int) -> Iterator[Slab]:
    start, stop = _cover(strides, box)
    dim = next((dim for dim, size in enumerate(box.shape) if size > 1), None)
    if dim is None:
        yield Slab(box, start, stop)
        return
    one_start, one_stop = _cover(strides, box.with_interval(dim, box.start[dim], box.start[dim] + 1))
    num_one = one_stop - one_start
    if strides[dim] - num_one > max_gap:
        step = 1
    elif stop - start <= max_elements:
        yield Slab(box, start, stop)
        return
    else:
        step = max(1, (max_elements - num_one) // strides[dim] + 1)
    for at in range(box.start[dim], box.stop[dim], step):
        band = box.with_interval(dim, at, min(at + step, box.stop[dim]))
        if step == 1:
            yield from _cut(strides, band, max_elements, max_gap)
        else:
            yield Slab(band, *_cover(strides, band))


def _cover(strides: tuple[int, ...], box: Box) -> tuple[int, int]:
    first = sum(at * stride for at, stride in zip(box.start, strides, strict=True))
    last = sum((at - 1) * stride for at, stride in zip(box.stop, strides, strict=True))
    return first, last + 1
