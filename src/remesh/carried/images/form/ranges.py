"""Sets of pages, as ordered disjoint address ranges.

The ranges stand in two columns: there may be a hundred thousand while a process is frozen, and what is done to a whole
column at once costs a tenth of the same by single ranges.
"""

from __future__ import annotations

import array
import bisect
import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self


class PageRange(NamedTuple):
    """Addresses ``[start, end)`` of whole pages."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PageSet:
    """Ranges of whole pages: ``starts[i] < ends[i] <= starts[i + 1]``, all multiples of the page size."""

    starts: array.array[int]
    ends: array.array[int]

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> Self:
        """Make a set of ranges that are in order and disjoint; those that touch stay two."""
        starts, ends = array.array("Q"), array.array("Q")
        for start, end in ranges:
            starts.append(start)
            ends.append(end)
        return cls(starts, ends)

    @classmethod
    def chain(cls, sets: Iterable[PageSet]) -> Self:
        """Chain sets in this order; the result is a set if they lie one behind the other."""
        chained = cls(array.array("Q"), array.array("Q"))
        for each in sets:
            chained.starts.extend(each.starts)
            chained.ends.extend(each.ends)
        return chained

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self.starts)

    def __iter__(self) -> Iterator[PageRange]:
        return map(PageRange, self.starts, self.ends)

    @property
    def num_bytes(self) -> int:
        return sum(self.ends) - sum(self.starts)

    def lengths(self) -> array.array[int]:
        """The bytes of each range."""
        return array.array("Q", map(operator.sub, self.ends, self.starts))

    def offsets(self) -> array.array[int]:
        """The number of bytes before each range, and last that of all ranges."""
        return array.array("Q", itertools.accumulate(self.lengths(), initial=0))

    def joined(self) -> PageSet:
        """The same pages with neighbours joined.

        >>> list(PageSet.of([(0, 4096), (4096, 8192), (12288, 16384)]).joined())
        [PageRange(start=0, end=8192), PageRange(start=12288, end=16384)]
        """
        if not any(map(operator.eq, self.ends, self.starts[1:])):
            return self
        breaks = [i for i in range(1, len(self)) if self.ends[i - 1] != self.starts[i]]
        starts = array.array("Q", (self.starts[i] for i in [0, *breaks]))
        return PageSet(starts, array.array("Q", (self.ends[i - 1] for i in [*breaks, len(self)])))

    def cut(self, addresses: Iterable[int]) -> PageSet:
        """The same pages; no range reaches over one of these addresses.

        >>> list(PageSet.of([(0, 8192), (12288, 16384)]).cut([4096, 12288]))
        [PageRange(start=0, end=4096), PageRange(start=4096, end=8192), PageRange(start=12288, end=16384)]
        """
        starts, ends = self.starts[:], self.ends[:]
        for address in addresses:
            index = bisect.bisect_left(starts, address)  # of the first range that does not begin before it
            if index and address < ends[index - 1]:
                starts.insert(index, address)
                ends.insert(index - 1, address)
        return PageSet(starts, ends)

    def touching(self, start: int, end: int) -> tuple[int, int]:
        """The ranges that have addresses in ``[start, end)``: from this index, up to that one."""
        return bisect.bisect_right(self.ends, start), bisect.bisect_left(self.starts, end)


def subtract(left: Iterable[PageRange], right: PageSet) -> Iterator[PageRange]:
    """The pages of ``left``, in order, that are not in ``right``; found as they are asked for."""
    for start, end in left:
        first, last = right.touching(start, end)
        for index in range(first, last):
            if start < right.starts[index]:
                yield PageRange(start, right.starts[index])
            start = right.ends[index]
        if start < end:
            yield PageRange(start, end)
