"""Sets of pages, and which of them an increment holds itself, against sets of page numbers."""

from __future__ import annotations

import array
import itertools

import pytest
from hypothesis import given, strategies as st

from remesh.carried.images.form.format import Ancestor, PagesState, index_pages
from remesh.carried.images.form.increment import PageSplit, drop_hidden, split_pages
from remesh.carried.images.form.layers import Layer, PageRun, layer_within, own_layer, visible_runs
from remesh.carried.images.form.pages import pieces_between
from remesh.carried.images.form.ranges import PageRange, PageSet, subtract

_PAGE = 4096

page_sets = st.sets(st.integers(0, 60))
layer_maps = st.dictionaries(st.integers(0, 60), st.integers(0, 99))
"""Which pages a layer has, and where their bytes are."""


def _single(pages: set[int]) -> PageSet:
    return PageSet.of((page * _PAGE, (page + 1) * _PAGE) for page in sorted(pages))


def _ranges(pages: set[int]) -> PageSet:
    return _single(pages).joined()


def _pages(ranges: PageSet) -> list[int]:
    return [at // _PAGE for item in ranges for at in range(item.start, item.end, _PAGE)]


def _layer(pages: dict[int, int]) -> Layer:
    return Layer(_single(set(pages)), array.array("Q", (at * _PAGE for _, at in sorted(pages.items()))))


def _map(layer: Layer) -> dict[int, int]:
    found = zip(layer.pages, layer.raw_offsets, strict=True)
    return {
        item.start // _PAGE + k: offset // _PAGE + k
        for item, offset in found
        for k in range((item.end - item.start) // _PAGE)
    }


def _packed(*numbers: int) -> bytes:
    return array.array("Q", numbers).tobytes()


@given(page_sets, page_sets)
def test_a_difference_is_that_of_sets(left: set[int], right: set[int]) -> None:
    assert _pages(PageSet.of(subtract(_ranges(left), _ranges(right)))) == sorted(left - right)


@given(page_sets)
def test_joined_ranges_do_not_touch(pages: set[int]) -> None:
    ranges = _ranges(pages)
    assert _pages(ranges) == sorted(pages)
    assert all(earlier.end < later.start for earlier, later in itertools.pairwise(ranges))
    assert ranges.num_bytes == len(pages) * _PAGE


@given(page_sets.filter(bool), st.integers(1, 7))
def test_pieces_of_memory_are_the_pages_in_order_however_chunks_cut_them(pages: set[int], chunk: int) -> None:
    ranges = _ranges(pages)
    offsets = ranges.offsets()
    found = []
    for begin in range(0, offsets[-1], chunk * _PAGE):
        end = min(begin + chunk * _PAGE, offsets[-1])
        pieces = pieces_between(ranges, offsets, begin, end)
        assert sum(pieces[1::2]) == end - begin
        for start, length in zip(pieces[0::2], pieces[1::2], strict=True):
            found += [at // _PAGE for at in range(start, start + length, _PAGE)]
    assert found == sorted(pages)


@given(page_sets, page_sets, st.lists(layer_maps, min_size=1, max_size=3))
def test_every_saved_page_is_found_once_and_written_ones_in_the_increment(
    saved: set[int], written: set[int], previous: list[dict[int, int]]
) -> None:
    split = split_pages(_ranges(saved & written), _ranges(saved), [_layer(each) for each in previous])
    stood = {page: (source, at) for source, each in reversed([*enumerate(previous, 1)]) for page, at in each.items()}
    own = [page for part in split.own for page in _pages(part)]
    # What was written stands first: it is on its way to the disk before the rest is known.
    assert own == [*sorted(saved & written), *sorted(saved - set(stood) - written)]
    runs = visible_runs([own_layer(*split.own), *split.inherited])
    found = {
        run.start // _PAGE + k: (run.source, run.raw_offset // _PAGE + k) for run in runs for k in range(run.num_pages)
    }
    assert found == {page: (0, own.index(page)) if page in own else stood[page] for page in saved}
    assert sum(run.num_pages for run in runs) * _PAGE == split.num_bytes == len(saved) * _PAGE
    assert [run.start for run in runs] == sorted(run.start for run in runs)


@given(layer_maps, page_sets)
def test_what_a_layer_has_of_some_pages_keeps_its_place(layer: dict[int, int], wanted: set[int]) -> None:
    within = layer_within(_layer(layer), _ranges(wanted))
    assert _map(within) == {page: at for page, at in layer.items() if page in wanted}


def test_longer_runs_are_cut_with_their_offsets() -> None:
    layer = Layer(PageSet.of([(10 * _PAGE, 20 * _PAGE)]), array.array("Q", [100 * _PAGE]))
    within = layer_within(layer, PageSet.of([(12 * _PAGE, 14 * _PAGE), (15 * _PAGE, 22 * _PAGE)]))
    assert list(within.pages) == [PageRange(12 * _PAGE, 14 * _PAGE), PageRange(15 * _PAGE, 20 * _PAGE)]
    assert list(within.raw_offsets) == [102 * _PAGE, 105 * _PAGE]


@given(page_sets, st.lists(layer_maps, max_size=3))
def test_images_that_no_page_needs_any_more_are_forgotten(own: set[int], maps: list[dict[int, int]]) -> None:
    split = PageSplit((_ranges(own),), [_layer(each) for each in maps], 0)
    left, used = drop_hidden(split, [Ancestor(str(number), "") for number in range(len(maps))])
    covered, expected = set(own), []
    for number, each in enumerate(maps):
        expected += [str(number)] if set(each) - covered else []
        covered |= set(each)
    assert [ancestor.folder for ancestor in used] == expected
    assert [_map(layer) for layer in left.inherited] == [maps[int(number)] for number in expected]


@given(page_sets, st.lists(layer_maps, max_size=3))
def test_layers_survive_the_way_through_an_index(own: set[int], maps: list[dict[int, int]]) -> None:
    pages = _ranges(own)
    state = index_pages([pages], [_layer(each) for each in maps])
    first, *others = state.layers(len(maps))
    assert list(first.pages) == list(pages)
    assert list(first.raw_offsets) == list(pages.offsets())[:-1]
    assert [_map(layer) for layer in others] == maps


def test_pages_that_were_gathered_out_of_order_are_found_in_order() -> None:
    (layer,) = PagesState(_packed(8 * _PAGE, 2, 4 * _PAGE, 1), b"").layers(0)
    assert _map(layer) == {4: 2, 8: 0, 9: 1}


@pytest.mark.parametrize(
    ("own", "inherited"),
    [
        ((0, 0), ()),
        ((_PAGE,), ()),
        ((1 << 63, 1), ()),
        ((0, 1 << 60), ()),
        ((0, 2, _PAGE, 1), ()),
        ((), (0, 1, 0, 0)),
        ((), (0, 1, 3, 0)),
        ((), (0, 1, 2, 0, 0, 1, 1, 0)),
        ((), (0, 2, 1, 0, _PAGE, 1, 1, 0)),
        ((), (0, 1, 1, 1 << 63)),
    ],
)
def test_a_forged_index_is_refused(own: tuple[int, ...], inherited: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="page"):
        PagesState(_packed(*own), _packed(*inherited)).layers(2)


def test_a_run_knows_its_end() -> None:
    run = PageRun.between(8192, 8192 + 3 * _PAGE, 0, 0)
    assert (run.num_pages, run.end, run.num_bytes) == (3, 8192 + 3 * _PAGE, 3 * _PAGE)
