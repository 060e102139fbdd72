"""Datatypes pack the bytes that NumPy's indexing picks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.mpi.upper import layouts

_INT = layouts.basic(4)


def _packed(layout: layouts.Layout, array: np.ndarray, count: int = 1) -> bytes:
    return bytes(layout.pack(memoryview(array).cast("B"), 0, count))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3))
def test_a_vector_is_a_slice_of_a_matrix(count: int, block: int, gap: int, num_elements: int) -> None:
    stride = block + gap
    layout = layouts.strided(_INT, count, block, 4 * stride)
    span = (count - 1) * stride + block
    array = np.arange(span * num_elements, dtype=np.int32)
    expected = [
        array[element * span + row * stride + column]
        for element in range(num_elements)
        for row in range(count)
        for column in range(block)
    ]
    assert layout.extent == 4 * span
    assert np.frombuffer(_packed(layout, array, num_elements), np.int32).tolist() == [int(v) for v in expected]


@given(st.data())
def test_a_subarray_is_a_box(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    starts = [data.draw(st.integers(0, n - 1)) for n in sizes]
    subsizes = [data.draw(st.integers(1, n - at)) for n, at in zip(sizes, starts, strict=True)]
    layout = layouts.subarray(_INT, sizes, subsizes, starts)
    array = np.arange(int(np.prod(sizes)), dtype=np.int32).reshape(sizes)
    box = array[tuple(slice(at, at + n) for at, n in zip(starts, subsizes, strict=True))]
    assert _packed(layout, array) == box.tobytes()
    assert layout.extent == array.nbytes


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=5))
def test_what_is_packed_comes_back_to_its_places(blocks: list[tuple[int, int]]) -> None:
    places: set[int] = set()
    parts = []
    for displacement, count in blocks:
        covered = set(range(displacement, displacement + count))
        if covered & places:
            continue
        places |= covered
        parts.append((4 * displacement, count, _INT))
    layout = layouts.placed(parts)
    array = np.arange(1, 11, dtype=np.int32)
    target = np.zeros(10, dtype=np.int32)
    layout.unpack(memoryview(_packed(layout, array)), memoryview(target).cast("B"), 0)
    assert target.tolist() == [int(array[i]) if i in places else 0 for i in range(10)]


def test_any_number_of_elements_without_gaps_is_one_segment() -> None:
    assert layouts.placed([(0, 1 << 40, _INT)]).segments == ((0, 4 << 40),)


_CHAR, _DOUBLE = layouts.basic(1), layouts.basic(8, alignment=8)


@pytest.mark.parametrize(
    ("parts", "lb", "extent"),
    [
        ([(0, 1, _DOUBLE), (8, 1, _CHAR)], 0, 16),
        ([(4, 1, _DOUBLE), (16, 1, _CHAR)], 4, 16),
        ([(-9, 1, _CHAR), (0, 1, _DOUBLE)], -9, 24),
        ([(0, 0, _DOUBLE), (8, 1, _CHAR)], 8, 1),
        ([(0, 1, layouts.strided(_DOUBLE, 2, 1, 24)), (64, 1, _CHAR)], 0, 72),
        ([(0, 1, layouts.resized(_DOUBLE, 0, 9)), (100, 1, _CHAR)], 0, 9),
        ([(3, 1, layouts.resized(_DOUBLE, 2, 9))], 5, 9),
        ([(0, 1, layouts.subarray(_DOUBLE, [4], [2], [1])), (64, 1, _CHAR)], 0, 32),
    ],
)
def test_a_struct_is_padded_as_in_c_unless_bounds_were_set(
    parts: list[tuple[int, int, layouts.Layout]], lb: int, extent: int
) -> None:  # the numbers are those of Open MPI 5.0.11
    layout = layouts.struct(parts)
    assert (layout.lb, layout.extent) == (lb, extent)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_span_holds_every_byte_that_packing_reads(count: int) -> None:
    layout = layouts.resized(layouts.placed([(8, 1, _INT), (0, 1, _INT)]), 0, 16)
    low, high = layout.span(count)
    offsets = [i * 16 + o + b for i in range(count) for o, n in layout.segments for b in range(n)]
    assert (low, high) == ((min(offsets), max(offsets) + 1) if offsets else (0, 0))
