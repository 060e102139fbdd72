"""Where do the bytes of a datatype lie in memory, and how do they become one contiguous run?

A *layout* is a list of segments ``(offset, bytes)`` in the order of the type map, neighbours joined, with a lower bound
and an extent: element ``i`` of a message begins ``i * extent`` behind the first. Packing copies the segments of all
elements one after another; that form is ours, the same under every MPI library. Source: MPI 4.1, chapter 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class Layout:
    """Segments of one element of a datatype."""

    segments: tuple[tuple[int, int], ...]  # (offset, bytes), bytes > 0, in type-map order
    lb: int  # lower bound, bytes
    extent: int  # from one element to the next, bytes
    alignment: int = 1  # the largest that C asks for of its values, bytes
    is_bounded: bool = False  # its bounds were set, and bound what it becomes a part of

    @cached_property
    def size(self) -> int:
        """Bytes of data in one element."""
        return sum(length for _, length in self.segments)

    @cached_property
    def true_lb(self) -> int:
        """Offset of the first byte of data."""
        return min((offset for offset, _ in self.segments), default=0)

    @cached_property
    def true_ub(self) -> int:
        """Offset behind the last byte of data."""
        return max((offset + length for offset, length in self.segments), default=0)

    @cached_property
    def is_dense(self) -> bool:
        """Whether many elements are one run of bytes without gaps."""
        return self.extent == self.size and (not self.segments or self.segments == ((0, self.size),))

    def span(self, count: int) -> tuple[int, int]:
        """First byte and end of the memory that ``count`` elements touch, relative to their start."""
        if count <= 0 or not self.segments:
            return 0, 0
        reach = (count - 1) * self.extent
        return self.true_lb + min(0, reach), self.true_ub + max(0, reach)

    def pack(self, memory: memoryview, start: int, count: int) -> bytearray:
        """The data of ``count`` elements that begin at ``start`` of ``memory``, as one run."""
        packed = bytearray(self.size * count)
        position = 0
        for base in range(start, start + count * self.extent, self.extent) if self.extent else [start] * count:
            for offset, length in self.segments:
                packed[position : position + length] = memory[base + offset : base + offset + length]
                position += length
        return packed

    def unpack(self, packed: memoryview, memory: memoryview, start: int) -> None:
        """The inverse, for as many bytes as ``packed`` has; the last element may be incomplete."""
        position, base = 0, start
        while position < len(packed):
            for offset, length in self.segments:
                piece = packed[position : position + length]
                memory[base + offset : base + offset + len(piece)] = piece
                position += len(piece)
            base += self.extent


def joined(segments: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Segments without empty ones, those that touch in order being one."""
    result: list[tuple[int, int]] = []
    for offset, length in segments:
        if not length:
            continue
        if result and sum(result[-1]) == offset:
            result[-1] = (result[-1][0], result[-1][1] + length)
        else:
            result.append((offset, length))
    return tuple(result)


def basic(size: int, extent: int | None = None, alignment: int = 1) -> Layout:
    """One value of ``size`` bytes."""
    return Layout(((0, size),) if size else (), 0, size if extent is None else extent, alignment)


def placed(parts: Sequence[tuple[int, int, Layout]]) -> Layout:
    """Blocks ``(displacement in bytes, number of elements, layout of an element)``: the general constructor.

    Where bounds of a part were set, only such parts count for the bounds of the whole. Source: MPI 4.1, section 5.1.6.
    """
    segments = joined(
        segment for displacement, count, part in parts for segment in _repeated(displacement, count, part)
    )
    filled = [part for part in parts if part[1]]
    is_bounded = any(part.is_bounded for _, _, part in filled)
    edges = [
        (start, start + part.extent)
        for displacement, count, part in filled
        if part.is_bounded == is_bounded
        for start in (displacement + part.lb, displacement + (count - 1) * part.extent + part.lb)
    ]
    lb, ub = min((start for start, _ in edges), default=0), max((end for _, end in edges), default=0)
    return Layout(segments, lb, ub - lb, max((part.alignment for _, _, part in filled), default=1), is_bounded)


def struct(parts: Sequence[tuple[int, int, Layout]]) -> Layout:
    """The same of elements that differ: unless bounds were set, its extent is padded as that of C's structs."""
    layout = placed(parts)
    if layout.is_bounded:
        return layout
    return replace(layout, extent=-(-layout.extent // layout.alignment) * layout.alignment)


def _repeated(displacement: int, count: int, part: Layout) -> Iterator[tuple[int, int]]:
    """Segments of ``count`` elements; one, however many they are, if they have no gaps."""
    if part.is_dense:
        yield displacement, count * part.size
        return
    for index in range(count):
        for offset, length in part.segments:
            yield displacement + index * part.extent + offset, length


def runs(layout: Layout, start: int, count: int) -> list[tuple[int, int]]:
    """Where the data of ``count`` elements that begin at ``start`` lie: (offset, bytes > 0), neighbours joined."""
    return list(joined(_repeated(start, count, layout)))


def resized(layout: Layout, lb: int, extent: int) -> Layout:
    """The same data with other bounds."""
    return replace(layout, lb=lb, extent=extent, is_bounded=True)


def strided(layout: Layout, count: int, block: int, stride_bytes: int) -> Layout:
    """``count`` blocks of ``block`` elements, ``stride_bytes`` from start to start."""
    if stride_bytes == block * layout.extent:
        return placed([(0, count * block, layout)])
    return placed([(index * stride_bytes, block, layout) for index in range(count)])


def subarray(layout: Layout, sizes: Sequence[int], subsizes: Sequence[int], starts: Sequence[int]) -> Layout:
    """A box of a row-major array; its extent is the whole array's."""
    current = layout
    stride = layout.extent
    num_elements = 1
    for size, subsize, start in zip(reversed(sizes), reversed(subsizes), reversed(starts), strict=True):
        moved = [(start * stride + index * stride, 1, current) for index in range(subsize)]
        current = resized(placed(moved), 0, stride)
        stride *= size
        num_elements *= size
    return resized(current, 0, num_elements * layout.extent)


def distributed(layout: Layout, sizes: Sequence[int], chosen: Sequence[Sequence[int]]) -> Layout:
    """The elements of a row-major array whose index in each dimension is among those chosen."""
    current = layout
    stride = layout.extent
    for size, indices in zip(reversed(sizes), reversed(chosen), strict=True):
        current = resized(placed([(index * stride, 1, current) for index in indices]), 0, stride)
        stride *= size
    return resized(current, 0, stride)
