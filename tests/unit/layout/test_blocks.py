"""Layouts gathered from what holders say: grids, flat ranges, ragged lengths."""

import pytest

from remesh.foundation.errors import LayoutError
from remesh.layout import (
    Box,
    FlatRange,
    GridBlock,
    layout_from_flat_ranges,
    layout_from_grid,
    layout_from_ragged,
)


def test_prepended_axes_are_dims_of_one_index():
    blocks = [GridBlock(rank, (rank // 2, 3 * (rank % 2), 0), (3, 2)) for rank in range(4)]
    layout = layout_from_grid((2, 6, 2), blocks, "bfloat16", num_prepended=1, fragments=(2, 2, 1))
    layout.check()
    assert layout.shards[3].box == Box((1, 3, 0), (2, 6, 2))
    assert layout.nbytes_of(3) == 12


def test_without_fragments_blocks_may_lie_anywhere():
    layout = layout_from_grid((5,), [GridBlock(0, (0,), (2,)), GridBlock(1, (2,), (3,))], "int8")
    layout.check()


@pytest.mark.parametrize(
    ("block", "fragments", "says"),
    [
        (GridBlock(3, (2, 0), (2, 4)), (3, 1), "3 fragments of 2 make 6, expected 4"),
        (GridBlock(3, (1, 0), (2, 4)), (2, 1), "offset 1 is no multiple of the block size 2"),
        (GridBlock(3, (1, 0), (2,)), (2, 1), "make 1 dims"),
        (GridBlock(3, (1,), (2, 4)), (2, 1), "has 1 and the global shape"),
        (GridBlock(3, (0, 0), (2, 4)), (2,), "1 fragment counts"),
    ],
)
def test_blocks_off_the_grid_name_holder_and_both_numbers(block, fragments, says):
    with pytest.raises(LayoutError, match=says):
        layout_from_grid((4, 4), [block], "int8", fragments=fragments)


def test_flat_ranges_of_one_holder_lie_end_to_end():
    layout = layout_from_flat_ranges(
        (3, 4), [FlatRange(0, 2, 9), FlatRange(1, 0, 2), FlatRange(1, 9, 12, None, 2)], "int8"
    )
    layout.check()
    assert [(str(s.box), s.offset) for s in layout.shards_of(0)] == [
        ("[0:1, 2:4]", 0),
        ("[1:2, 0:4]", 2),
        ("[2:3, 0:1]", 6),
    ]
    assert [(str(s.box), s.offset) for s in layout.shards_of(1)] == [("[0:1, 0:2]", 0), ("[2:3, 1:4]", 2)]


def test_a_flat_range_may_belong_to_a_shard():
    half = Box((0, 2), (3, 4))
    layout = layout_from_flat_ranges((3, 4), [FlatRange(0, 1, 5, half)], "int8")
    assert [str(shard.box) for shard in layout.shards] == ["[0:1, 3:4]", "[1:2, 2:4]", "[2:3, 2:3]"]


def test_a_flat_range_past_the_end_is_an_error():
    with pytest.raises(LayoutError, match=r"flat range 0:13 .* <= 12"):
        layout_from_flat_ranges((3, 4), [FlatRange(0, 0, 13)], "int8")


def test_ragged_lengths_must_add_up():
    layout_from_ragged((4, 3), 1, {"file:a": 3}, "int8").check()
    with pytest.raises(LayoutError, match="add up to 4, expected 3"):
        layout_from_ragged((4, 3), 1, {0: 4}, "int8")
    with pytest.raises(LayoutError, match="expected dim 0 to 1"):
        layout_from_ragged((4, 3), 2, {0: 4}, "int8")
