"""Large buffers are used again, and are not two borrowers' at once."""

from __future__ import annotations

from hypothesis import given, strategies as st

from remesh.carried.mpi.lower.buffers import LargeBuffers

_MIB = 1 << 20


def test_a_buffer_that_came_back_is_lent_again_and_no_other_is_taken_back() -> None:
    buffers = LargeBuffers()
    first = buffers.lend(5 * _MIB)
    first[:] = bytes([7]) * len(first)
    for other in (bytearray(5), memoryview(bytearray(5)), b"", None):
        buffers.take_back(other)
    assert buffers.kept_bytes == 0
    buffers.take_back(first)
    assert buffers.kept_bytes == 6 * _MIB
    assert buffers.lend(_MIB + 5)[0] == 0, "three times its size is too large"
    again = buffers.lend(5 * _MIB + 1)
    assert (len(again), again[0], buffers.kept_bytes) == (5 * _MIB + 1, 7, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * _MIB)), max_size=12))
def test_what_is_lent_is_apart_and_what_is_kept_is_bounded(events: list[tuple[bool, int]]) -> None:
    buffers, lent = LargeBuffers(), list[tuple[int, memoryview]]()
    for number, (comes_back, num_bytes) in enumerate(events):
        if comes_back and lent:
            mark, view = lent.pop(num_bytes % len(lent))
            assert (view[0], view[-1]) == (mark, mark)
            buffers.take_back(view)
        else:
            view = buffers.lend(num_bytes)
            assert len(view) == num_bytes
            view[0] = view[-1] = number
            lent.append((number, view))
        assert buffers.kept_bytes <= 64 * _MIB
    assert all(view[0] == view[-1] == mark for mark, view in lent)
