"""Sets of pages, and which of them an increment holds itself, against sets of page numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from remesh.transparent.images.format import Ancestor, PageRun
from remesh.transparent.images.increment import number_sources, split_pages
from remesh.transparent.images.ranges import PageRange, join, subtract

_PAGE = 4096

page_sets = st.sets(st.integers(0, 60))


def _ranges(pages: set[int]) -> list[PageRange]:
    return join([PageRange(page * _PAGE, (page + 1) * _PAGE) for page in sorted(pages)])


def _pages(ranges: list[PageRange]) -> list[int]:
    return [at // _PAGE for item in ranges for at in range(item.start, item.end, _PAGE)]


@given(page_sets, page_sets)
def test_a_difference_is_that_of_sets(left: set[int], right: set[int]) -> None:
    assert _pages(subtract(_ranges(left), _ranges(right))) == sorted(left - right)


@given(page_sets)
def test_joined_ranges_do_not_touch(pages: set[int]) -> None:
    ranges = _ranges(pages)
    assert _pages(ranges) == sorted(pages)
    assert all(earlier.end < later.start for earlier, later in itertools.pairwise(ranges))


@given(page_sets, page_sets, st.dictionaries(st.integers(0, 60), st.tuples(st.integers(0, 3), st.integers(0, 99))))
def test_every_saved_page_is_found_once_and_written_ones_in_the_increment(
    saved: set[int], written: set[int], previous: dict[int, tuple[int, int]]
) -> None:
    runs = [PageRun(page * _PAGE, 1, source, at * _PAGE) for page, (source, at) in sorted(previous.items())]
    split = split_pages(_ranges(saved & written), _ranges(saved - written), runs)
    own = _pages(split.own)
    found = {
        run.start // _PAGE + k: (run.source, run.raw_offset // _PAGE + k)
        for run in split.inherited
        for k in range(run.num_pages)
    }
    assert found == {page: previous[page] for page in (saved - written) & set(previous)}
    assert own == sorted(saved - set(found))


def test_longer_runs_are_cut_with_their_offsets() -> None:
    runs = [PageRun(10 * _PAGE, 10, 2, 100 * _PAGE)]
    unwritten = [PageRange(12 * _PAGE, 14 * _PAGE), PageRange(15 * _PAGE, 22 * _PAGE)]
    split = split_pages([PageRange(14 * _PAGE, 15 * _PAGE)], unwritten, runs)
    assert split.inherited == [PageRun(12 * _PAGE, 2, 2, 102 * _PAGE), PageRun(15 * _PAGE, 5, 2, 105 * _PAGE)]
    assert _pages(split.own) == [14, 20, 21]


def test_images_that_no_page_needs_any_more_are_forgotten() -> None:
    runs = [PageRun(0, 1, 0, 0), PageRun(_PAGE, 1, 2, 0)]
    ancestors = [Ancestor(name, "") for name in ("previous", "unused", "old")]
    numbered, used = number_sources(runs, ancestors)
    assert [run.source for run in numbered] == [1, 2]
    assert [ancestor.folder for ancestor in used] == ["previous", "old"]
