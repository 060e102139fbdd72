"""What a restore decides before it touches the process: which areas get huge pages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remesh.transparent.images.format import AreaState, PageRun
from remesh.transparent.images.proc_text import AreaKind
from remesh.transparent.images.restore import dense_areas

_PAGE = 4096
_HUGE = 2 << 20
_PER_HUGE = _HUGE // _PAGE


def _area(first: int, last: int, path: str = "") -> AreaState:
    return AreaState(first * _PAGE, last * _PAGE, "rw-p", AreaKind.ANONYMOUS, 0, path, grows_down=False)


def _runs(pages: set[int]) -> list[PageRun]:
    return [PageRun(page * _PAGE, 1, 0, 0) for page in sorted(pages)]


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 3000)), min_size=1, max_size=3),
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
)
def test_a_dense_area_costs_at_most_a_sixteenth_more_in_huge_pages(
    gaps: list[tuple[int, int]], holes: list[int]
) -> None:
    areas, pages, at = [], set(), _PER_HUGE
    for index, (gap, length) in enumerate(gaps):
        at += gap
        areas.append(_area(at, at + length))
        pages |= {page for page in range(at, at + length) if page % 16 >= holes[index % len(holes)] - 1}
        at += length
    found = dense_areas(areas, _runs(pages))
    for area in areas:
        inside = {page for page in pages if area.start <= page * _PAGE < area.end}
        huge = {page // _PER_HUGE for page in inside}
        expected = len(inside) * 16 >= len(huge) * _PER_HUGE * 15 and len(inside) * _PAGE >= 4 << 20
        assert (area in found) == expected


def test_the_heap_and_the_stack_are_left_as_they_are() -> None:
    areas = [_area(512, 2560, "[heap]"), _area(4096, 6144), _area(8192, 10240, "[stack]")]
    runs = [PageRun(area.start, (area.end - area.start) // _PAGE, 0, 0) for area in areas]
    assert dense_areas(areas, runs) == [areas[1]]
