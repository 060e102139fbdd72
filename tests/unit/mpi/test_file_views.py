"""Views of files: runs of bytes as laying tile after tile would find them, one byte at a time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.mpi.upper import layouts
from remesh.mpi.upper.file_views import FileView
from remesh.mpi.upper.layouts import Layout
from tests.unit.mpi.file_view_cases import positions, views


@given(views(), st.integers(0, 30), st.integers(0, 30))
def test_runs_are_the_bytes_of_the_tiles_in_order(view: FileView, start: int, num_bytes: int) -> None:
    runs = list(view.runs(start, num_bytes))
    assert [at + i for at, length in runs for i in range(length)] == positions(view, start + num_bytes)[start:]


@given(views(), st.integers(0, 30), st.integers(1, 30))
def test_runs_that_touch_are_one(view: FileView, start: int, num_bytes: int) -> None:
    runs = list(view.runs(start, num_bytes))
    assert all(one[0] + one[1] < other[0] for one, other in itertools.pairwise(runs))


@given(views(), st.integers(0, 30), st.integers(1, 30))
def test_the_span_begins_with_the_first_byte_and_ends_with_the_last(view: FileView, start: int, num: int) -> None:
    places = positions(view, start + num)[start:]
    assert view.span(start, num) == (places[0], places[-1] + 1)


@given(views(), st.integers(0, 12))
def test_the_position_of_an_etype_is_that_of_its_first_byte(view: FileView, offset: int) -> None:
    assert view.byte_offset(offset) == positions(view, offset * view.etype_bytes + 1)[-1]


@given(views(), st.integers(0, 40))
def test_the_end_of_a_file_is_the_first_etype_that_starts_behind_it(view: FileView, end: int) -> None:
    starts = positions(view, 60 * view.etype_bytes)[:: view.etype_bytes]
    assert view.num_etypes_before(end) == next(offset for offset, start in enumerate(starts) if start >= end)


def test_a_view_without_gaps_is_one_run_however_long() -> None:
    assert list(FileView(7, 8, layouts.basic(8)).runs(1 << 50, 1 << 40)) == [(7 + (1 << 50), 1 << 40)]


def test_a_filetype_without_data_has_no_runs_and_refuses_data() -> None:
    view = FileView(3, 1, layouts.placed([]))
    assert list(view.runs(0, 0)) == []
    assert (view.byte_offset(5), view.num_etypes_before(100)) == (3, 0)
    with pytest.raises(ValueError, match="4 bytes of data in a view whose filetype has none"):
        next(view.runs(0, 4))


def test_tiles_may_interlock() -> None:
    """A column of blocks whose extent is one block: the next tile begins between the blocks of this one."""
    view = FileView(0, 1, Layout(((0, 2), (6, 2)), 0, 2))
    assert list(view.runs(0, 8)) == [(0, 2), (6, 2), (2, 2), (8, 2)]
    # 0 to 7 by the first segments of four tiles, and 6 by the second segment of the first.
    assert view.num_etypes_before(7) == 8


@pytest.mark.parametrize(
    ("displacement", "etype_bytes", "tile", "why"),
    [
        (-1, 1, layouts.basic(1), "displacement is -1"),
        (0, 0, layouts.basic(1), "etype has no data"),
        (0, 4, layouts.basic(6), "6 bytes, no multiple of the etype's 4"),
        (0, 1, Layout(((4, 1), (0, 1)), 0, 8), "expected them to ascend"),
        (0, 1, Layout(((-1, 1),), -1, 8), "expected them to ascend"),
        (0, 1, Layout(((0, 4), (2, 4)), 0, 8), "expected them to ascend"),
        (0, 1, Layout(((0, 4),), 0, 0), "extent is 0"),
    ],
)
def test_views_that_the_standard_forbids_are_refused(
    displacement: int, etype_bytes: int, tile: Layout, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        FileView(displacement, etype_bytes, tile)
