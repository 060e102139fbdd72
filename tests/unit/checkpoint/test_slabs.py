"""Slabs make up the wanted box, once, and read little in vain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from remesh.checkpoint.plan.slabs import find_runs, plan_slabs
from remesh.layout import Box


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    box = Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
    return shape, box, draw(st.integers(1, 100)), draw(st.integers(0, 20))


@given(cases())
def test_slabs_cover_the_box_once_and_their_runs_hold_them(case: tuple[tuple[int, ...], Box, int, int]) -> None:
    shape, box, max_elements, max_gap = case
    numbers = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    seen = np.zeros(shape, int)
    for slab in plan_slabs(shape, box, max_elements, max_gap):
        seen[slab.box.slices()] += 1
        inside = numbers[slab.box.slices()]
        assert (slab.start, slab.stop) == (inside.min(), inside.max() + 1)
        assert slab.is_run == (inside.size == slab.stop - slab.start)
        assert slab.stop - slab.start <= max(max_elements, 1)
        assert np.diff(np.sort(inside.ravel()), prepend=slab.start - 1).max() <= max_gap + 1
    expected = np.zeros(shape, int)
    expected[box.slices()] = 1
    assert (seen == expected).all()


@pytest.mark.parametrize(
    ("box", "num_slabs", "num_read"),
    [
        (Box((0, 0), (64, 64)), 4, 4096),  # everything, cut by length only
        (Box((8, 0), (16, 64)), 1, 512),  # rows: nothing in vain
        (Box((0, 8), (64, 16)), 64, 512),  # columns far apart: row by row
        (Box((0, 2), (64, 64)), 4, 4096 - 4 * 2),  # columns close together: in bands, the gaps read along
    ],
)
def test_what_is_read_in_vain_is_bounded(box: Box, num_slabs: int, num_read: int) -> None:
    slabs = list(plan_slabs((64, 64), box, 1024, 4))
    assert (len(slabs), sum(slab.stop - slab.start for slab in slabs)) == (num_slabs, num_read)


@given(cases())
def test_runs_are_the_elements_of_the_box_in_order(case: tuple[tuple[int, ...], Box, int, int]) -> None:
    shape, box, *_ = case
    if box.is_empty:
        return
    numbers = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    runs = find_runs(shape, box)
    found = runs.starts[:, None] + np.arange(runs.length)
    assert found.reshape(-1).tolist() == numbers[box.slices()].reshape(-1).tolist()
    between = np.diff(runs.starts) - runs.length
    assert runs.gap == (between.min() if len(between) else 0)
