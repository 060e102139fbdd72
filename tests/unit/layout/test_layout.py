"""Layouts: what a bad one is told, and what a good one answers."""

import dataclasses

import pytest

from remesh.foundation.errors import LayoutError
from remesh.layout import Box, Layout, Mesh, Shard, compute_missing, compute_overlap, itemsize_bytes, layout_from_spec


def _layout(*shards, shape=(4, 4), partial=None):
    return Layout(shape, tuple(Shard(*each) for each in shards), "float32", partial)


WHOLE = Box((0, 0), (4, 4))
TOP, BOTTOM = WHOLE.split(0, 2)


def test_a_box_out_of_bounds_names_tensor_holder_box_and_both_numbers():
    with pytest.raises(
        LayoutError, match=r"'w': holder 3 has box \[2:6, 0:4\], which ends at 6 in dim 0, expected at most 4"
    ):
        _layout((3, Box((2, 0), (6, 4)))).check_in_bounds("w")


def test_an_empty_box_out_of_bounds_is_an_error_too():
    with pytest.raises(LayoutError, match="ends at 9"):
        _layout((3, Box((9, 0), (9, 4)))).check("w")


def test_boxes_that_overlap_partially_name_both_holders_and_the_shared_box():
    layout = _layout((0, TOP), (1, Box((1, 0), (4, 4))))
    with pytest.raises(LayoutError, match=r"'w': .* holder 0 .* holder 1 share \[1:2, 0:4\] \(4 elements\)"):
        layout.check_disjoint("w")
    layout.check_complete("w")


def test_a_holder_with_the_same_box_twice_is_an_error():
    with pytest.raises(LayoutError, match=r"holder 'file:x' has box \[0:2, 0:4\] twice"):
        _layout(("file:x", TOP), ("file:x", TOP, 8)).check_disjoint()


def test_replicas_are_no_overlap():
    _layout((0, TOP), (1, TOP), (0, BOTTOM), (2, BOTTOM)).check()


def test_an_incomplete_layout_names_a_box_nobody_has_and_both_counts():
    with pytest.raises(LayoutError, match=r"'w': 2 holders keep 12 of 16 elements, .* no holder has box \[2:4, 2:4\]"):
        _layout((0, TOP), (1, Box((2, 0), (4, 2)))).check("w")


def test_a_partial_layout_needs_every_addend_complete():
    full = _layout((0, WHOLE, 0, None, 0), (1, WHOLE, 0, None, 1), partial="sum")
    full.check()
    with pytest.raises(LayoutError, match="8 of 16 elements of addend 1"):
        _layout((0, WHOLE, 0, None, 0), (1, TOP, 0, None, 1), partial="sum").check()
    with pytest.raises(LayoutError, match="0 of 16 elements of addend 0"):
        _layout((1, WHOLE, 0, None, 1), partial="sum").check()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"global_shape": (4, -1)}, "negative size"),
        ({"global_shape": (2**31, 2**31)}, "64 bits"),
        ({"dtype": "float31"}, "dtype 'float31'"),
        ({"partial": "xor"}, "no reduction"),
        ({"global_shape": (4,)}, "box .* of 2 dims, expected 1"),
        ({"shards": (Shard(0, WHOLE, addend=2),)}, "keeps addend 2"),
    ],
)
def test_a_layout_that_contradicts_itself_cannot_be_made(how, says):
    with pytest.raises(LayoutError, match=says):
        dataclasses.replace(_layout((0, WHOLE)), **how)


@pytest.mark.parametrize("how", [{"offset": -1}, {"strides": (1,)}, {"strides": (4, -1)}, {"addend": -1}])
def test_a_shard_that_contradicts_itself_cannot_be_made(how):
    with pytest.raises(LayoutError, match="placing box"):
        Shard(0, WHOLE, **how)


def test_holders_are_ranks_by_number_then_names():
    layout = _layout(("file:b", WHOLE), (10, WHOLE), (2, WHOLE), ("file:a", WHOLE))
    assert layout.holders == (2, 10, "file:a", "file:b")
    assert [shard.holder for shard in compute_overlap(layout, layout)[0].givers] == list(layout.holders)


def test_a_missing_name_when_renaming_is_an_error():
    with pytest.raises(LayoutError, match="2 of 3 have no new name, first 1"):
        _layout((0, TOP), (1, TOP), (2, TOP)).map_holders({0: 5})


@pytest.mark.parametrize("how", [{"global_shape": (5, 4)}, {"dtype": "int8"}, {"partial": "sum"}])
def test_layouts_of_different_tensors_do_not_merge(how):
    one = _layout((0, TOP))
    with pytest.raises(LayoutError, match="merging two layouts"):
        one.merge(dataclasses.replace(one, **how))


def test_layouts_of_different_shapes_have_no_overlap_but_an_error():
    with pytest.raises(LayoutError, match=r"'w': the source has global shape \(4, 4\), the destination \(4, 5\)"):
        compute_overlap(_layout((0, TOP)), _layout((0, TOP), shape=(4, 5)), "w")


def test_a_failed_node_leaves_exactly_the_boxes_it_alone_had():
    layout = layout_from_spec("S01R", (8, 4), Mesh.of({"dp": 2, "tp": 2}), "int8")
    survivors = layout.restrict([0, 1])
    assert compute_missing(survivors, layout) == (Box((4, 0), (6, 4)), Box((6, 0), (8, 4)))
    replicated = layout_from_spec("S1R", (8, 4), Mesh.of({"dp": 2, "tp": 2}), "int8")
    assert compute_missing(replicated.restrict([0, 1]), replicated) == ()


def test_offset_of_a_box_inside_a_shard():
    shard = Shard(0, Box((2, 2), (6, 6)), offset=10, strides=(8, 1))
    assert shard.offset_of(Box((3, 4), (5, 5))) == 10 + 8 + 2
    with pytest.raises(LayoutError, match="does not lie inside"):
        shard.offset_of(Box((0, 0), (3, 3)))


def test_unknown_dtype_lists_the_known_ones():
    with pytest.raises(LayoutError, match="bfloat16"):
        itemsize_bytes("torch.float32")
