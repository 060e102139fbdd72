"""Which bytes of a file does a view show, and where do runs of its data lie?

A *view* is a displacement, an etype and a filetype. The filetype's layout is laid into the file again and again from
the displacement on, tile after tile; the bytes of its segments, in order, are the *data* of the view, as if they stood
alone. Offsets count etypes of data.

1. Data byte ``n`` is in tile ``n // size``, at ``n % size`` of that tile's data.
2. Its segment follows by bisection over the data that come before each segment of a tile.
3. From there on segments are taken in order; runs that touch in the file are joined.

Source: MPI 4.1, sections 14.1.1 and 14.3.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from remesh.mpi.upper.layouts import Layout


@dataclass(frozen=True)
class FileView:
    """What a process sees of a file."""

    displacement: int  # bytes from the start of the file to the first tile, >= 0
    etype_bytes: int  # of data in one etype, > 0
    filetype: Layout  # size a multiple of etype_bytes; segments ascend and are >= 0; extent > 0 where it has data

    def __post_init__(self) -> None:
        tile = self.filetype
        if self.displacement < 0:
            raise ValueError(f"the displacement is {self.displacement} bytes, expected none or more")
        if self.etype_bytes <= 0:
            raise ValueError("the etype has no data; choose one with at least one byte")
        if tile.size % self.etype_bytes:
            raise ValueError(f"the filetype has {tile.size} bytes, no multiple of the etype's {self.etype_bytes}")
        ends = [0, *itertools.accumulate((offset + length for offset, length in tile.segments), max)]
        if any(offset < end for (offset, _), end in zip(tile.segments, ends, strict=False)):
            raise ValueError("the filetype's displacements are negative, fall or overlap; expected them to ascend")
        if tile.size and tile.extent <= 0:
            raise ValueError(f"the filetype's extent is {tile.extent} bytes, expected more than 0")

    @cached_property
    def _starts(self) -> list[int]:
        """Data of a tile before each of its segments, bytes."""
        return [0, *itertools.accumulate(length for _, length in self.filetype.segments)][:-1]

    def runs(self, start: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """``(position in the file, bytes)`` of data bytes ``start`` to ``start + num_bytes``, in order, joined.

        Raises:
            ValueError: there are data to place, and the filetype has none.
        """
        if num_bytes <= 0:
            return
        if not self.filetype.size:
            raise ValueError(f"{num_bytes} bytes of data in a view whose filetype has none")
        if self.filetype.is_dense:
            yield self.displacement + start, num_bytes
            return
        position = length = 0
        for piece, piece_bytes in self._pieces(start, num_bytes):
            if length and piece == position + length:
                length += piece_bytes
                continue
            if length:
                yield position, length
            position, length = piece, piece_bytes
        yield position, length

    def _pieces(self, start: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """The same, a piece for each segment."""
        tile, within = divmod(start, self.filetype.size)
        first = bisect_right(self._starts, within) - 1
        skipped = within - self._starts[first]
        while True:
            base = self.displacement + tile * self.filetype.extent
            for offset, length in self.filetype.segments[first:]:
                taken = min(length - skipped, num_bytes)
                yield base + offset + skipped, taken
                num_bytes -= taken
                if not num_bytes:
                    return
                skipped = 0
            tile, first = tile + 1, 0

    def span(self, start: int, num_bytes: int) -> tuple[int, int]:
        """Positions of the first and behind the last of so many data bytes, at least one."""
        (first, _), (last, _) = next(self.runs(start, 1)), next(self.runs(start + num_bytes - 1, 1))
        return first, last + 1

    def byte_offset(self, offset: int) -> int:
        """Position in the file of the etype at ``offset``."""
        if not self.filetype.size:
            return self.displacement
        return self.span(offset * self.etype_bytes, 1)[0]

    def num_etypes_before(self, end: int) -> int:
        """Etypes of which some data lie before position ``end``: the offset of the first one behind it.

        With the size of the file: where SEEK_END is.
        """
        reach = end - self.displacement
        num_bytes = sum(self._before(reach, offset, length) for offset, length in self.filetype.segments)
        return -(-num_bytes // self.etype_bytes)

    def _before(self, reach: int, offset: int, length: int) -> int:
        """Bytes of one segment, in all tiles, that lie less than ``reach`` behind the displacement."""
        extent = self.filetype.extent
        num_whole = max(0, (reach - offset - length) // extent + 1)
        left = reach - offset - num_whole * extent
        return num_whole * length + sum(range(left, 0, -extent))
