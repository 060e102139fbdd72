"""Boxes: half-open n-d intervals of global indices.

Definitions. A *box* is a pair of corners ``start <= stop``; it holds the elements ``x`` with
``start[d] <= x[d] < stop[d]`` for every dim ``d``. Coordinates are literal: a negative one is an error, never "from the
end". A box of a 0-d tensor has empty corners and one element. A box with an empty side has no element; it is a value
like any other, but it shares nothing with any other.

The algebra is intersection, difference and translation; everything else in this package is built on it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remesh.foundation.errors import LayoutError


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A half-open n-d interval; ordered by ``start``, then ``stop`` (row-major order of first elements).

    >>> Box((0, 2), (4, 6)).intersect(Box((3, 0), (9, 5)))
    Box((3, 2), (4, 5))
    """

    start: tuple[int, ...]
    """First global index in each dim. Invariant: ``0 <= start[d] <= stop[d]``."""
    stop: tuple[int, ...]
    """One past the last global index in each dim. Invariant: ``len(stop) == len(start)``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", tuple(map(operator.index, self.start)))
        object.__setattr__(self, "stop", tuple(map(operator.index, self.stop)))
        if len(self.start) != len(self.stop):
            raise LayoutError(
                f"making a box: start {self.start} has {len(self.start)} dims but stop {self.stop} has "
                f"{len(self.stop)}; give one start and one stop per dim"
            )
        for dim, (start, stop) in enumerate(zip(self.start, self.stop, strict=True)):
            if not 0 <= start <= stop:
                raise LayoutError(
                    f"making a box: dim {dim} runs from {start} to {stop}, expected 0 <= start <= stop; "
                    "boxes are half-open and their coordinates are never negative"
                )

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def at(cls, start: Sequence[int], shape: Sequence[int]) -> Box:
        """The box of this shape whose first element is ``start``."""
        if len(start) != len(shape):
            raise LayoutError(
                f"making a box: offset {tuple(start)} has {len(start)} dims and shape {tuple(shape)} has {len(shape)}, "
                "expected the same number; give one start and one size per dim"
            )
        return cls(tuple(start), tuple(s + n for s, n in zip(start, shape, strict=True)))

    def __repr__(self) -> str:
        return f"Box({self.start}, {self.stop})"

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"

    @property
    def ndim(self) -> int:
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements; 1 for a 0-d box."""
        return math.prod(self.shape)

    @property
    def is_empty(self) -> bool:
        return any(map(operator.ge, self.start, self.stop))

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` is in this box; true for any empty ``other``."""
        self._check_ndim(other, "containment")
        return other.is_empty or (
            all(a <= b for a, b in zip(self.start, other.start, strict=True))
            and all(a >= b for a, b in zip(self.stop, other.stop, strict=True))
        )

    def intersect(self, other: Box) -> Box | None:
        """The box of the elements in both, or None when they share none."""
        self._check_ndim(other, "intersection")
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if all(map(operator.lt, start, stop)):
            return Box(start, stop)
        return None

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """The elements of this box that are not in ``other``, as at most ``2 * ndim`` disjoint boxes.

        Dim by dim the part before and the part after ``other`` is cut off; what remains is the
        intersection, which is dropped. The pieces come out in row-major order of their dims.
        """
        shared = self.intersect(other)
        if shared is None:
            return () if self.is_empty else (self,)
        pieces = []
        rest = self
        for dim in range(self.ndim):
            before, rest = rest.split(dim, shared.start[dim])
            rest, after = rest.split(dim, shared.stop[dim])
            pieces += [piece for piece in (before, after) if not piece.is_empty]
        return tuple(pieces)

    def split(self, dim: int, at: int) -> tuple[Box, Box]:
        """The two halves on either side of global index ``at`` in ``dim``; either may be empty."""
        if not 0 <= dim < self.ndim or not self.start[dim] <= at <= self.stop[dim]:
            raise LayoutError(
                f"splitting box {self} in dim {dim} at {at}: the cut lies outside the box; intersect it with what lies "
                "on either side instead"
            )
        return self.with_interval(dim, self.start[dim], at), self.with_interval(dim, at, self.stop[dim])

    def with_interval(self, dim: int, start: int, stop: int) -> Box:
        """The box with other ends in one dim."""
        return Box(
            (*self.start[:dim], start, *self.start[dim + 1 :]),
            (*self.stop[:dim], stop, *self.stop[dim + 1 :]),
        )

    def translate(self, offset: Sequence[int]) -> Box:
        """The box moved by ``offset``, which may be negative as long as the result is not."""
        if len(offset) != self.ndim:
            raise LayoutError(f"moving box {self} by {tuple(offset)}: expected {self.ndim} numbers, one per dim")
        return Box(
            tuple(a + o for a, o in zip(self.start, offset, strict=True)),
            tuple(b + o for b, o in zip(self.stop, offset, strict=True)),
        )

    def relative_to(self, frame: Box) -> Box:
        """This box in the coordinates of ``frame``, whose start becomes the origin."""
        if not frame.contains(self) or self.start < frame.start:
            raise LayoutError(
                f"expressing box {self} relative to {frame}: it does not lie inside; intersect the two first"
            )
        return self.translate(tuple(-a for a in frame.start))

    def slices(self) -> tuple[slice, ...]:
        """Index expression that selects this box from an array in the same coordinates."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def runs(self, parent: Box) -> Iterator[tuple[int, int]]:
        """Maximal contiguous runs ``(parent_start, length)`` of this box in row-major ``parent``, in elements.

        Trailing dims that this box spans entirely are one run with the dim before them.
        """
        inner = self.relative_to(parent)
        if inner.is_empty:
            return
        parent_shape = parent.shape
        split_dim = inner.ndim
        while split_dim > 0 and inner.shape[split_dim - 1] == parent_shape[split_dim - 1]:
            split_dim -= 1
        split_dim = max(split_dim - 1, 0)
        length = math.prod(inner.shape[split_dim:])
        strides = row_major_strides(parent_shape)
        first = sum(a * s for a, s in zip(inner.start, strides, strict=True))
        for index in _row_major(inner.shape[:split_dim]):
            yield first + sum(i * s for i, s in zip(index, strides, strict=False)), length

    def _check_ndim(self, other: Box, doing: str) -> None:
        if len(self.start) != len(other.start):
            raise LayoutError(
                f"computing the {doing} of boxes {self} and {other}: they have {self.ndim} and {other.ndim} dims, "
                "expected the same number; both must describe the same tensor"
            )


def are_in_a_row(boxes: Sequence[Box]) -> bool:
    """Whether the boxes follow each other in one dim: the usual way of being disjoint, and cheap to see.

    >>> are_in_a_row([Box((0, 4), (9, 6)), Box((0, 0), (9, 4))])
    True
    """
    if len(boxes) < 2:
        return True
    for dim in range(len(boxes[0].start)):
        spans = sorted([(box.start[dim], box.stop[dim]) for box in boxes])
        if all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans)):
            return True
    return False


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous row-major array; an empty dim counts as 1, as in NumPy and torch."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def _row_major(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every index of an array of this shape, last dim fastest."""
    if not shape:
        yield ()
        return
    for head in range(shape[0]):
        for tail in _row_major(shape[1:]):
            yield (head, *tail)
