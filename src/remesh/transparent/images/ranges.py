"""Which pages are in one set and in another? Sets of pages are lists of ranges, in order and disjoint."""

from __future__ import annotations

from typing import NamedTuple


class PageRange(NamedTuple):
    """Addresses ``[start, end)`` of whole pages. A tuple, since there may be a hundred thousand."""

    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def join(ranges: list[PageRange]) -> list[PageRange]:
    """The same pages with neighbours joined; ``ranges`` is in order.

    >>> join([PageRange(0, 4096), PageRange(4096, 8192), PageRange(12288, 16384)])
    [PageRange(start=0, end=8192), PageRange(start=12288, end=16384)]
    """
    joined: list[PageRange] = []
    for item in ranges:
        if joined and joined[-1].end == item.start:
            joined[-1] = PageRange(joined[-1].start, item.end)
        else:
            joined.append(item)
    return joined


def subtract(left: list[PageRange], right: list[PageRange]) -> list[PageRange]:
    """The pages of ``left`` that are not in ``right``; each list is in order and disjoint."""
    result, j = [], 0
    for item in left:
        start = item.start
        while j < len(right) and right[j].end <= start:
            j += 1
        k = j
        while k < len(right) and right[k].start < item.end:
            if start < right[k].start:
                result.append(PageRange(start, right[k].start))
            start = max(start, right[k].end)
            k += 1
        if start < item.end:
            result.append(PageRange(start, item.end))
    return result
