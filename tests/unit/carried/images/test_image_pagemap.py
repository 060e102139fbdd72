"""Which pages the kernel says are there: each once, however many runs they make, and no run over two areas."""

from __future__ import annotations

import itertools
import mmap
import os

import pytest

from remesh.carried.images.form.ranges import PageRange
from remesh.carried.images.look.pagemap import AreaSpan, PageMap, private_spans
from remesh.foundation.linux.calls import address_of
from remesh.foundation.linux.proc_text import Area

_PAGE = mmap.PAGESIZE


def _area(start: int, end: int, path: str = "") -> Area:
    return Area(start, end, "rw-p", 0, "00:00", 0, path)


def _mapping(num_pages: int) -> tuple[mmap.mmap, int]:
    """Memory of this process, of which nothing is there, and its address."""
    room = mmap.mmap(-1, num_pages * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_NOHUGEPAGE)
    return room, address_of(memoryview(room))


@pytest.mark.parametrize("num_runs", [1, 512, 513, 819, 1024, 1536, 1537, 2048])
def test_every_page_is_found_once_however_many_runs_there_are(num_runs: int) -> None:
    room, start = _mapping(2 * num_runs)
    for page in range(0, 2 * num_runs, 2):
        room[page * _PAGE] = 1
    with PageMap(os.getpid()) as pages:
        found = pages.saved(AreaSpan((_area(start, start + len(room)),)))
    assert list(found) == [PageRange(at, at + _PAGE) for at in range(start, start + len(room), 2 * _PAGE)]


def test_no_range_of_pages_reaches_over_two_areas() -> None:
    room, start = _mapping(6)
    room[: 5 * _PAGE] = bytes([1]) * (5 * _PAGE)
    borders = [start, start + 2 * _PAGE, start + 3 * _PAGE, start + len(room)]
    (span,) = private_spans([_area(*each) for each in itertools.pairwise(borders)])
    with PageMap(os.getpid()) as pages:
        found = pages.saved(span)
    assert list(found) == list(map(PageRange, borders[:3], [*borders[1:3], start + 5 * _PAGE]))


def test_areas_of_one_kind_are_one_span_until_another_kind_lies_between() -> None:
    kinds = ["", "", "/lib/a", "/lib/b", "[vdso]", "/lib/c", "", "[vvar]"]
    areas = [_area(k * _PAGE, (k + 1) * _PAGE, path) for k, path in enumerate(kinds)]
    assert [[area.path for area in span.areas] for span in private_spans(areas)] == [
        ["", ""], ["/lib/a", "/lib/b"], ["/lib/c"], [""],
    ]  # fmt: skip
