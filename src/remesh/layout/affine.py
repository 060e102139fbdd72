"""Boxes of recorded places: shards of a tensor from the list of its elements and of where each of them lies.

Definitions. A *recording* of one tensor is a list of pairs (element, place): the flat index of an element in the
tensor, and the place where it lies in a holder's buffer. A *run* is a part of the list in which both advance by
constant steps. A *chain* is the same of boxes, along one dim.

Algorithm. Nothing here loops over elements; all steps are NumPy's on whole arrays:

1. The list is cut into runs, greedily. In the order of places, or of elements where that leaves fewer.
2. A run whose elements advance by the stride of a dim is a box one wide in all other dims; at the end of the dim it is
   cut. Any other run is a box for each element.
3. Dim by dim, from the last one, neighbours whose places advance by one step are joined, until nothing changes.

The cover is exact; it is not always the smallest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remesh.foundation.errors import LayoutError
from remesh.layout.box import Box, row_major_strides
from remesh.layout.box_array import IntArray
from remesh.layout.shard import Shard

_MOST_BOXES = 1 << 17
"""More boxes of one tensor than this are no layout: planning them would take longer than moving the tensor."""
_BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class AffineRuns:
    """Parts of a recording in which elements and places advance by constant steps."""

    element: IntArray
    """First element of each run."""
    place: IntArray
    """Where it lies."""
    length: IntArray
    """Invariant: >= 1."""
    element_step: IntArray
    """Meaningless where the length is 1; as is the step of places."""
    place_step: IntArray

    def select(self, kept: _BoolArray) -> AffineRuns:
        """Those runs alone."""
        return AffineRuns(*(each[kept] for each in _columns(self)))

    def points(self) -> AffineRuns:
        """A run of length 1 for each element."""
        whose = np.repeat(np.arange(len(self.length)), self.length)
        at = np.arange(len(whose)) - np.repeat(np.cumsum(self.length) - self.length, self.length)
        element, place = (
            (first + at * step)
            for first, step in (
                (self.element[whose], self.element_step[whose]),
                (self.place[whose], self.place_step[whose]),
            )
        )
        one = np.ones_like(element)
        return AffineRuns(element, place, one, one, one)


def find_runs(elements: IntArray, places: IntArray) -> AffineRuns:
    """The runs of a recording, which is in the order of places.

    >>> find_runs(np.array([0, 1, 2, 8, 9, 10]), np.arange(6)).length.tolist()
    [3, 3]
    """
    runs = _runs_in_order(elements, places)
    if 4 * len(runs.length) <= len(elements):
        return runs
    order = np.argsort(elements, kind="stable")
    others = _runs_in_order(elements[order], places[order])
    return others if len(others.length) < len(runs.length) else runs


def join_runs(parts: Sequence[AffineRuns]) -> AffineRuns:
    """All runs one after another."""
    return AffineRuns(*(np.concatenate(each) for each in zip(*map(_columns, parts), strict=True)))


def shards_of_runs(runs: AffineRuns, shape: Sequence[int], doing: str) -> tuple[Shard, ...]:
    """The boxes of a tensor of this shape in which its elements are recorded, in the order of their places.

    Holder 0 is a placeholder. ``doing`` begins the message of `LayoutError`, where boxes are too many to be a layout.

    >>> turned = find_runs(np.array([0, 3, 1, 4, 2, 5]), np.arange(6))
    >>> [(str(shard.box), shard.strides) for shard in shards_of_runs(turned, (2, 3), "reading")]
    [('[0:2, 0:3]', (1, 2))]
    """
    boxes = _boxes_of(runs, tuple(shape))
    ndim, num_before = len(shape), -1
    while len(boxes.place) != num_before:
        num_before = len(boxes.place)
        for dim in reversed(range(ndim)):
            boxes = _join_along(boxes, dim)
    if num_before > _MOST_BOXES:
        raise LayoutError(
            f"{doing}: a tensor of shape {tuple(shape)} lies there in {num_before} boxes, expected at most "
            f"{_MOST_BOXES}; its elements are permuted without an order that boxes have"
        )
    order = np.argsort(boxes.place, kind="stable")
    columns = (each[order].tolist() for each in (boxes.start, boxes.extent, boxes.place, boxes.stride))
    return tuple(
        Shard(0, Box.at(start, extent), place, tuple(stride))
        for start, extent, place, stride in zip(*columns, strict=True)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Boxes:
    """Boxes of a tensor, and where they lie."""

    start: IntArray
    """``[num_boxes, ndim]``, as the other two below."""
    extent: IntArray
    stride: IntArray
    """Between places; 0 where the extent is 1. Invariant: >= 0."""
    place: IntArray
    """``[num_boxes]``"""


def _columns(runs: AffineRuns) -> tuple[IntArray, ...]:
    return runs.element, runs.place, runs.length, runs.element_step, runs.place_step


def _runs_in_order(elements: IntArray, places: IntArray) -> AffineRuns:
    step, place_step = np.diff(elements), np.diff(places)
    starts = _chain_starts((step, place_step), (step > 0) & (place_step > 0))
    first = np.flatnonzero(starts)
    length = np.diff(first, append=len(elements))
    # The last run may be one element, behind which there is no step.
    steps, place_steps = (np.append(each, 1)[first] for each in (step, place_step))
    return AffineRuns(elements[first], places[first], length, steps, place_steps)


def _chain_starts(steps: Sequence[IntArray], may_join: _BoolArray) -> _BoolArray:
    """Which items begin a chain, of n items with n - 1 steps between: one takes as many as have its first step.

    Item i + 1 begins one if it may not be joined, or if item i continues a chain of another step. So where steps differ
    the answer is the opposite of the one before, and between two that do not depend on it only parity counts.
    """
    num_steps = len(may_join)
    starts = np.ones(num_steps + 1, dtype=bool)
    if not num_steps:
        return starts
    is_same = np.zeros(num_steps, dtype=bool)
    is_same[1:] = may_join[:-1]
    for each in steps:
        is_same[1:] &= each[1:] == each[:-1]
    is_toggled = may_join & ~is_same
    num_toggled = np.cumsum(is_toggled)
    last_fixed = np.maximum.accumulate(np.where(is_toggled, -1, np.arange(num_steps)))
    of_fixed = np.where(last_fixed < 0, True, ~may_join[last_fixed])
    since: IntArray = num_toggled - np.where(last_fixed < 0, 0, num_toggled[last_fixed])
    starts[1:] = of_fixed ^ (since % 2 == 1)
    return starts


def _boxes_of(runs: AffineRuns, shape: tuple[int, ...]) -> _Boxes:
    """Boxes that are longer than 1 in one dim alone."""
    strides = row_major_strides(shape)
    axis = np.full(len(runs.length), -1)
    for dim in reversed(range(len(shape))):
        axis[(axis < 0) & (runs.element_step == strides[dim]) & (shape[dim] > 1)] = dim
    axis[runs.length == 1] = -1
    is_odd = (axis < 0) & (runs.length > 1)
    if is_odd.any():
        runs = join_runs([runs.select(~is_odd), runs.select(is_odd).points()])
        axis = np.append(axis[~is_odd], np.full(len(runs.length) - int((~is_odd).sum()), -1))
    # The end of a dim cuts a run.
    size, stride = (np.array((*each, 1), dtype=np.int64)[axis] for each in (shape, strides))
    at = np.where(axis < 0, 0, runs.element // stride % size)
    num_parts = -(-(at + runs.length) // size)
    num_parts[axis < 0] = 1
    whose = np.repeat(np.arange(len(num_parts)), num_parts)
    part = np.arange(len(whose)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    low = np.maximum(part * size[whose] - at[whose], 0)
    high = np.minimum((part + 1) * size[whose] - at[whose], runs.length[whose])
    element = runs.element[whose] + low * runs.element_step[whose]
    start = (
        np.stack([element // strides[dim] % max(shape[dim], 1) for dim in range(len(shape))], axis=1)
        if shape
        else (np.zeros((len(element), 0), dtype=np.int64))
    )
    extent, place_stride = np.ones_like(start), np.zeros_like(start)
    rows = np.flatnonzero(axis[whose] >= 0)
    extent[rows, axis[whose][rows]] = (high - low)[rows]
    place_stride[rows, axis[whose][rows]] = np.where(high - low > 1, runs.place_step[whose], 0)[rows]
    return _Boxes(start, extent, place_stride, runs.place[whose] + low * runs.place_step[whose])


def _join_along(boxes: _Boxes, dim: int) -> _Boxes:
    """Boxes that follow each other in a dim, are alike in all others, and whose places advance by one step, as one."""
    others = [each for each in range(boxes.start.shape[1]) if each != dim]
    keys = [each[:, other] for other in others for each in (boxes.stride, boxes.extent, boxes.start)]
    order = np.lexsort((boxes.place, boxes.start[:, dim], *keys))
    order = order[np.argsort(_num_equal_before(boxes.start[order]), kind="stable")]
    start, extent, stride, place = (each[order] for each in (boxes.start, boxes.extent, boxes.stride, boxes.place))
    length, step = extent[:-1, dim], np.diff(place)
    may_join = (start[1:, dim] == start[:-1, dim] + length) & (step > 0) & (step % length == 0)
    step = step // length
    for side in (slice(None, -1), slice(1, None)):
        may_join &= (extent[side, dim] == 1) | (stride[side, dim] == step)
    for each in (start, extent, stride):
        may_join &= (each[1:, others] == each[:-1, others]).all(axis=1)
    first = np.flatnonzero(_chain_starts((step,), may_join))
    last = np.append(first[1:], len(place)) - 1
    is_longer = last > first
    stop = start[last, dim] + extent[last, dim]
    start, extent, stride = start[first], extent[first], stride[first]
    extent[:, dim] = stop - start[:, dim]
    stride[is_longer, dim] = step[first[is_longer]]
    return _Boxes(start, extent, stride, place[first])


def _num_equal_before(starts: IntArray) -> IntArray:
    """How many rows just before each are equal to it: elements that lie in several places make chains of their own."""
    at = np.arange(len(starts))
    is_new = np.ones(len(starts), dtype=bool)
    is_new[1:] = (starts[1:] != starts[:-1]).any(axis=1)
    return at - np.maximum.accumulate(np.where(is_new, at, 0))
