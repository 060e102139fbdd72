"""Placements: the chunk rule and what it does on several axes."""

import pytest

from remesh.foundation.errors import LayoutError
from remesh.layout import (
    Box,
    Mesh,
    Partial,
    Replicate,
    Split,
    StridedSplit,
    boxes_at,
    layout_from_placements,
    local_shape_at,
)


def _lengths(layout):
    return [shard.box.size for shard in layout.shards]


def test_ten_over_two_by_four_is_chunked_axis_after_axis():
    layout = layout_from_placements((10,), Mesh.of({"a": 2, "b": 4}), (Split(0), Split(0)), "float32")
    assert _lengths(layout) == [2, 2, 1, 0, 2, 2, 1, 0]


def test_an_empty_shard_lies_at_the_end_of_its_dim():
    layout = layout_from_placements((5, 3), Mesh.of({"a": 4}), (Split(0),), "float32")
    assert layout.shards[3].box == Box((5, 0), (5, 3))
    assert layout.nbytes_of(3) == 0


def test_strided_split_interleaves_as_fsdp_over_tensor_parallel():
    mesh = Mesh.of({"dp": 2, "tp": 2})
    layout = layout_from_placements((8, 8), mesh, (StridedSplit(0, 2), Split(0)), "float32")
    assert [shard.box.start[0] for shard in layout.shards] == [0, 4, 2, 6]


def test_strided_split_alone_gives_several_boxes_in_one_buffer():
    boxes = boxes_at((9, 2), (4,), (0,), (StridedSplit(0, 2),))
    assert boxes == ((Box((0, 0), (2, 2)), 0, (2, 1)), (Box((5, 0), (6, 2)), 4, (2, 1)))
    assert local_shape_at((9, 2), (4,), (0,), (StridedSplit(0, 2),)) == (3, 2)


def test_strided_pieces_in_an_inner_dim_keep_the_strides_of_the_whole_local_tensor():
    boxes = boxes_at((2, 9), (4,), (1,), (StridedSplit(1, 2),))
    assert [(str(box), offset, strides) for box, offset, strides in boxes] == [
        ("[0:2, 2:4]", 0, (3, 1)),
        ("[0:2, 6:7]", 2, (3, 1)),
    ]


def test_replicas_hold_equal_boxes_and_scalars_are_whole():
    layout = layout_from_placements((), Mesh.of({"a": 3}, world_ranks=[5, 1, 9]), (Replicate(),), "float32")
    assert [(shard.holder, shard.box) for shard in layout.shards] == [(r, Box((), ())) for r in (5, 1, 9)]
    assert layout.holders == (1, 5, 9)
    layout.check()


def test_partial_axes_number_their_addends_row_major():
    mesh = Mesh.of({"a": 2, "b": 2, "c": 2})
    layout = layout_from_placements((4,), mesh, (Partial(), Split(0), Partial()), "float32")
    assert layout.partial == "sum"
    assert [shard.addend for shard in layout.shards] == [0, 1, 0, 1, 2, 3, 2, 3]
    layout.check()


@pytest.mark.parametrize(
    ("placements", "says"),
    [
        ((Split(0),), "1 placements .* mesh of 2 axes"),
        ((Split(2), Replicate()), "names dim 2, expected 0 to 1"),
        ((Split(-1), Replicate()), "names dim -1"),
        ((StridedSplit(0, 0), Replicate()), "split factor >= 1"),
        ((Partial("sum"), Partial("max")), "2 different reductions"),
        ((Partial("xor"), Replicate()), "no reduction"),
    ],
)
def test_placements_that_cannot_be_are_named(placements, says):
    with pytest.raises(LayoutError, match=says):
        layout_from_placements((4, 4), Mesh.of({"a": 2, "b": 2}), placements, "float32")


def test_a_coordinate_outside_the_mesh_is_named():
    with pytest.raises(LayoutError, match=r"coordinate \(2,\) lies outside"):
        boxes_at((4,), (2,), (2,), (Split(0),))
