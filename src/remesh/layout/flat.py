"""Conversion between ranges of a flattened tensor and boxes.

Definitions. A *flat range* ``start:stop`` counts the elements of a box in row-major order from 0; FSDP's flat
parameters and Megatron's distributed optimizer cut there without looking at dims.

Algorithm. Going from dim 0 inwards, a range that does not begin and end on whole rows is a ragged head, whole
rows in the middle, and a ragged tail; head and tail are again flat ranges, of one row each. Each dim adds at
most a box before and a box after, hence at most ``2 * ndim - 1`` boxes, in flat order.
"""

from __future__ import annotations

import math

from remesh.foundation.errors import LayoutError
from remesh.layout.box import Box, row_major_strides


def boxes_of_flat_range(box: Box, start: int, stop: int) -> tuple[Box, ...]:
    """The elements ``start:stop`` of ``box`` flattened row-major, as boxes in flat order.

    The concatenation of these boxes, each flattened, is the range. At most ``2 * ndim - 1`` boxes, none empty.

    >>> boxes_of_flat_range(Box((0, 0), (4, 3)), 2, 10)
    (Box((0, 2), (1, 3)), Box((1, 0), (3, 3)), Box((3, 0), (4, 1)))
    """
    if not 0 <= start <= stop <= box.size:
        raise LayoutError(
            f"taking flat range {start}:{stop} of box {box}: expected 0 <= start <= stop <= {box.size}, its number of "
            "elements; flat ranges count the elements of the box itself"
        )
    if start == stop:
        return ()
    return tuple(_boxes(box, 0, start, stop))


def flat_range_of_box(parent: Box, box: Box) -> tuple[int, int] | None:
    """The range ``start, stop`` of ``parent`` flattened row-major that is exactly ``box``; None if it is not one run.

    An empty box is the empty range at its place.

    >>> flat_range_of_box(Box((0, 0), (4, 3)), Box((1, 0), (3, 3)))
    (3, 9)
    """
    inner = box.relative_to(parent)
    strides = row_major_strides(parent.shape)
    start = sum(at * stride for at, stride in zip(inner.start, strides, strict=True))
    if inner.is_empty:
        return min(start, parent.size), min(start, parent.size)
    # One run: single indices, then any interval, then whole dims.
    dim = 0
    while dim < inner.ndim and inner.shape[dim] == 1:
        dim += 1
    if inner.shape[dim + 1 :] != parent.shape[dim + 1 :]:
        return None
    return start, start + inner.size


def _boxes(box: Box, dim: int, start: int, stop: int) -> list[Box]:
    """Boxes of the non-empty range of ``box``, whose dims before ``dim`` have one index each."""
    if dim == box.ndim:
        return [box]
    row = math.prod(box.shape[dim + 1 :])
    base = box.start[dim]
    first, skipped = divmod(start, row)
    last, taken = divmod(stop, row)
    if skipped and first == last:
        return _boxes(box.with_interval(dim, base + first, base + first + 1), dim + 1, skipped, taken)
    found: list[Box] = []
    if skipped:
        found += _boxes(box.with_interval(dim, base + first, base + first + 1), dim + 1, skipped, row)
        first += 1
    if first < last:
        found.append(box.with_interval(dim, base + first, base + last))
    if taken:
        found += _boxes(box.with_interval(dim, base + last, base + last + 1), dim + 1, 0, taken)
    return found
