"""Overlaps that are found together are those that are found one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from remesh.foundation.errors import LayoutError
from remesh.layout import Box, Layout, Shard, compute_overlap, compute_overlaps
from remesh.layout.box import are_in_a_row
from tests.support.layouts import layouts, shapes


@given(st.data())
def test_many_overlaps_at_once_are_those_of_each_pair(data: st.DataObject) -> None:
    pairs = []
    for number in range(data.draw(st.integers(0, 4))):
        shape = data.draw(shapes())
        src, dst = (data.draw(layouts(shape)) for _ in range(2))
        pairs.append((src, Layout(shape, dst.shards, src.dtype), f"t{number}"))
    for pair, found in zip(pairs, compute_overlaps(pairs), strict=True):
        expected = compute_overlap(*pair)
        assert found.src is expected.src
        assert found.dst is expected.dst
        for name in ("src_index", "dst_index", "starts", "stops", "sizes"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_a_pair_of_different_tensors_among_others_is_refused_by_name() -> None:
    layout, other = (Layout((n,), (Shard(0, Box((0,), (n,))),), "int8") for n in (4, 5))
    with pytest.raises(LayoutError, match="'odd'"):
        compute_overlaps([(layout, layout, "even"), (layout, other, "odd")])


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 4), min_size=1, max_size=5))
def test_boxes_in_a_row_are_disjoint(corners: list[tuple[int, int, int, int]]) -> None:
    boxes = [Box((a, b), (a + 1 + c, b + 1 + d)) for a, b, c, d in corners]
    if are_in_a_row(boxes):
        assert all(boxes[i].intersect(boxes[j]) is None for i in range(len(boxes)) for j in range(i))
