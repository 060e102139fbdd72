"""Runs and chunks of accesses to windows, and the state of windows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from remesh.carried.mpi.calls.table import RUN
from remesh.carried.mpi.lower import state
from remesh.carried.mpi.lower.accesses import AccessChunk, cut, pack_runs, unpack_runs
from remesh.carried.mpi.lower.exposure import Asker, Exposure, Locks
from remesh.foundation.errors import FormatError

# Runs, chunks, verbs.


@given(
    st.lists(st.tuples(st.integers(-(2**40), 2**40), st.integers(1, 3000)), max_size=20),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.integers(256, 1000),
)
def test_chunks_are_the_runs_in_order_in_whole_elements_that_fit(
    shape: list[tuple[int, int]], unit: int, room: int
) -> None:
    runs = [(offset, length * unit) for offset, length in shape]
    chunks = list(cut(runs, unit, room))
    positions = [offset + byte for offset, length in runs for byte in range(length)]
    covered = [offset + byte for chunk in chunks for offset, length in chunk.runs for byte in range(length)]
    assert covered == positions
    for before, chunk in zip([AccessChunk(0, ()), *chunks], chunks, strict=False):
        assert chunk.position == before.position + before.num_bytes
        assert chunk.num_bytes % unit == 0 and chunk.num_bytes + RUN.size * len(chunk.runs) <= room


@given(st.integers(1, 400), st.integers(256, 600))
def test_values_that_lie_in_two_runs_stay_in_one_chunk(count: int, room: int) -> None:
    runs = [(8 * index + offset, length) for index in range(count) for offset, length in ((0, 2), (4, 4))]
    assert all(chunk.num_bytes % 6 == 0 for chunk in cut(runs, 6, room))


@given(st.lists(st.tuples(st.integers(-(2**60), 2**60), st.integers(0, 2**40)), max_size=8))
def test_runs_come_back_from_their_bytes(runs: list[tuple[int, int]]) -> None:
    assert unpack_runs(pack_runs(runs) + b"data", len(runs)) == runs


@pytest.mark.parametrize(("data", "num_runs"), [(b"", 1), (bytes(31), 2), (b"", -1), (RUN.pack(0, -1), 1)])
def test_bytes_that_are_no_runs_are_refused(data: bytes, num_runs: int) -> None:
    with pytest.raises(ValueError, match="run"):
        unpack_runs(data, num_runs)


# Their state.


@pytest.mark.parametrize(
    "window",
    [
        [9, -1, [], [], []],
        [9, 0, [[-8, 8]], [], []],
        [9, 0, [[8, -8]], [], []],
        [9, 0, [[8]], [], []],
        [9, 0, [], [[3, True, 1]], []],
        [9, 0, [], [], [[-1, True, 1]]],
        [9, 0, [], [[0, True, 1], [1, False, 2]], []],
        [9, 0, [], [[0, True]], []],
        [9],
        ["nine", 0, [], [], []],
    ],
)
def test_a_window_that_no_lower_half_would_have_written_is_noticed(window: list[Any]) -> None:
    records = {
        "rank": 0,
        "size": 3,
        "next": {},
        "finished": False,
        "windows": [window],
        **{name: [] for name in ("requests", "posted", "arrived", "messages", "owed", "parcels", "members")},
        "entered": [],
        "attached": [],
    }
    sound = state.pack(records | {"windows": [[9, 8, [[8, 80]], [[0, True, 1]], [[2, False, 2]]]]}, [])
    assert state.load(sound, rank=0, size=3).windows == {
        9: Exposure(8, {8: 80}, Locks([Asker(0, True, 1)], [Asker(2, False, 2)]))
    }
    with pytest.raises(FormatError) as caught:
        state.load(state.pack(records, []), rank=0, size=3)
    assert caught.value.reason == "damaged"
