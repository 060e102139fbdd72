"""What is in shared memory is believed only after it was checked."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from remesh.elasticity.snapshots.form import (
    ALIGN_BYTES,
    SnapshotDescription,
    TensorEntry,
    plan_starts,
    read_description,
    write_description,
)
from remesh.elasticity.snapshots.snapshot_header import COMPLETE_AT, read_step
from remesh.foundation.errors import FormatError
from remesh.layout import Box, Shard

ENTRY = TensorEntry("model.weight", "float32", (8, 4), (4, 4), 0, (Shard(0, Box((4, 0), (8, 4))),))
SNAPSHOT = SnapshotDescription(12, 144, (ENTRY,), {"optim.param_groups": [{"lr": 0.1}]})


def memory_of(snapshot: SnapshotDescription, *, complete: bool = True) -> bytearray:
    memory = bytearray(write_description(snapshot) + b"\7" * snapshot.data_bytes)
    memory[COMPLETE_AT] = int(complete)
    return memory


def test_description_is_read_as_it_was_written() -> None:
    memory = memory_of(SNAPSHOT)
    found = read_description(memoryview(memory))
    assert found is not None
    assert found[0] == SNAPSHOT
    assert memory[found[1] :] == b"\7" * 64
    assert read_step(memoryview(memory)) == 12


def test_writer_that_died_in_the_middle_left_no_snapshot() -> None:
    memory = memoryview(memory_of(SNAPSHOT, complete=False))
    assert read_description(memory) is None
    assert read_step(memory) == -1
    assert read_description(b"") is None
    assert read_description(bytes(4096)) is None


@given(st.integers(0, len(memory_of(SNAPSHOT)) - 65), st.integers(1, 255))
def test_damaged_description_is_never_believed(at: int, change: int) -> None:
    memory = memory_of(SNAPSHOT)
    memory[at] ^= change
    try:
        found = read_description(memoryview(memory))
    except FormatError as error:
        assert error.reason == "damaged-snapshot"
        return
    # The step and the samples alone have no checksum; padding means nothing.
    assert found is None or found[0].entries == SNAPSHOT.entries


@pytest.mark.parametrize("length", range(0, 200, 7))
def test_memory_that_is_cut_short_is_refused(length: int) -> None:
    memory = memoryview(memory_of(SNAPSHOT))[:length]
    try:
        assert read_description(memory) is None
    except FormatError as error:
        assert error.reason == "damaged-snapshot"


@pytest.mark.parametrize("start", [-64, 3, 64])
def test_tensor_that_would_lie_outside_is_refused(start: int) -> None:
    strange = SnapshotDescription(1, 1, (TensorEntry("w", "float32", (4,), (16,), start, ()),), {})
    memory = bytearray(write_description(strange) + bytes(64))
    memory[COMPLETE_AT] = 1
    with pytest.raises(FormatError, match="tensor 'w'|expected"):
        read_description(memoryview(memory))


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_tensors_lie_apart_and_aligned(sizes: list[int]) -> None:
    starts = plan_starts(sizes)
    assert all(start % ALIGN_BYTES == 0 for start in starts)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
