"""The fast paths of finding pairs and atoms, each against comparing all with all."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from remesh.foundation.errors import LayoutError
from remesh.layout import Box, Layout, Mesh, atoms, box_array, compute_overlap, layout_from_spec
from remesh.layout.box_array import BoxArray, find_pairs, is_disjoint
from tests.support.layouts import boxes, complete_layouts, indices_of, layouts, overlap_by_index, shapes, unfold


@st.composite
def _two_arrays(draw: st.DrawFn) -> tuple[BoxArray, BoxArray]:
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    whole = Box.of_shape(shape)
    each = st.lists(boxes(whole).filter(lambda box: not box.is_empty), min_size=1, max_size=12)
    return BoxArray.of(draw(each), len(shape)), BoxArray.of(draw(each), len(shape))


def _sorted_pairs(pairs):
    return sorted(zip(*(index.tolist() for index in pairs), strict=True))


@given(_two_arrays())
def test_sweep_finds_the_pairs_that_comparing_all_finds(arrays):
    a, b = arrays
    assert _sorted_pairs(box_array._pairs_by_sweep(a, b)) == _sorted_pairs(box_array._pairs_all_with_all(a, b))


@given(_two_arrays())
def test_sweep_in_small_blocks_finds_the_same(arrays):
    a, b = arrays
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_array, "_CANDIDATES_AT_ONCE", 3)
        assert _sorted_pairs(box_array._pairs_by_sweep(a, b)) == _sorted_pairs(box_array._pairs_all_with_all(a, b))


@given(shapes().flatmap(lambda shape: st.tuples(complete_layouts(shape), complete_layouts(shape))))
def test_grids_find_the_pairs_that_comparing_all_finds_in_order(two):
    a, b = (layout.atoms.boxes for layout in two)
    grid_a, grid_b = box_array._grid_of(a), box_array._grid_of(b)
    if grid_a is None or grid_b is None or a.ndim == 0:
        return
    expected = box_array._in_row_major_order(a, b, *box_array._pairs_all_with_all(a, b))
    found = box_array._pairs_of_grids(grid_a, grid_b)
    assert [index.tolist() for index in found] == [index.tolist() for index in expected]


@given(_two_arrays())
def test_disjoint_means_no_index_in_two_boxes(arrays):
    a, _ = arrays
    indices = [index for i in range(len(a)) for index in indices_of(a.box(i))]
    expected = len(indices) == len(set(indices))
    assert is_disjoint(a) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_array, "_ALL_WITH_ALL", 0)
        assert is_disjoint(a) == expected


@given(shapes().flatmap(lambda shape: st.tuples(layouts(shape), layouts(shape))))
def test_overlap_by_the_fast_paths_covers_every_element_once(two):
    src, dst = two
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_array, "_ALL_WITH_ALL", 0)
        assert unfold(compute_overlap(src, dst)) == overlap_by_index(src, dst)


@pytest.mark.parametrize("cells_per_overlap", [0, 10**6], ids=["by splitting", "by cuts"])
@given(two=shapes().flatmap(lambda shape: st.tuples(layouts(shape), layouts(shape))))
def test_refining_either_way_covers_every_element_once(two, cells_per_overlap):
    src, dst = two
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atoms, "_CELLS_PER_OVERLAP", cells_per_overlap)
        assert unfold(compute_overlap(src, dst)) == overlap_by_index(src, dst)


def test_a_thousand_by_a_thousand_takes_the_grid_path_and_is_right():
    mesh = Mesh.of({"a": 32, "b": 32})
    rows = layout_from_spec("S01R", (1024, 64), mesh, "int8")
    grid = layout_from_spec("S1S0", (1024, 64), mesh, "int8")
    overlap = compute_overlap(rows, grid)
    assert len(overlap) == 1024 * 32
    assert set(overlap.sizes.tolist()) == {2}
    assert all(each.givers[0].box.contains(each.box) and each.takers[0].box.contains(each.box) for each in overlap)


def test_a_grid_with_a_hole_is_still_a_grid():
    mesh = Mesh.of({"a": 16, "b": 16})
    grid = layout_from_spec("S0S1", (160, 160), mesh, "int8")
    torn = grid.restrict(set(range(256)) - {7, 200})
    assert box_array._grid_of(torn.atoms.boxes) is not None
    assert int(compute_overlap(torn, grid).sizes.sum()) == 160 * 160 - 2 * 100


def test_union_of_two_large_layouts_is_refined_and_complete():
    mesh = Mesh.of({"a": 8, "b": 16})
    rows = layout_from_spec("S01R", (128, 128), mesh, "int8")
    columns = layout_from_spec("RS01", (128, 128), mesh, "int8").map_holders(lambda rank: f"snapshot:{rank}")
    union = rows.merge(columns)
    assert len(union.atoms) == 128 * 128
    assert all({type(s.holder) for s in group} == {int, str} for group in union.atoms.shards)
    union.check_complete()
    with pytest.raises(LayoutError, match="share"):
        union.check_disjoint()


def test_a_box_that_does_not_fit_64_bits_is_an_error():
    with pytest.raises(LayoutError, match="largest index"):
        BoxArray.of([Box((0,), (2**63,))], 1)


def test_an_empty_box_is_refused():
    with pytest.raises(LayoutError, match="empty"):
        BoxArray.of([Box((1,), (1,))], 1)


def test_no_boxes_have_no_pairs():
    nothing = BoxArray.of([], 2)
    some = BoxArray.of([Box((0, 0), (1, 1))], 2)
    assert [len(index) for index in find_pairs(nothing, some)] == [0, 0]
    assert is_disjoint(nothing)
    assert len(compute_overlap(Layout((3,), (), "int8"), Layout((3,), (), "int8"))) == 0


def test_coordinates_too_large_for_one_sort_key_are_still_ordered():
    far = 2**40
    a = BoxArray.of([Box((far, far), (far + 2, far + 2)), Box((0, far), (1, far + 9))], 2)
    index_a, index_b = find_pairs(a, a)
    assert index_a.tolist() == index_b.tolist() == [1, 0]
    assert np.array_equal(a.sizes, [4, 9])
