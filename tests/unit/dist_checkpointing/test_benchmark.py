"""The benchmarks of the room run, tiny, and compare what they say they compare."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.checkpoint import formats, storage


def test_saves_and_loads_are_compared(tmp_path: Path) -> None:
    state = {f"t{at}": torch.randn(10, 3) for at in range(3)}
    rows = storage.save_and_load("tiny", state, tmp_path, 1, (None, 1.0, 1.0))
    assert all(row.value > 0 for row in rows)
    assert {row.peer for row in rows if row.goal is not None} == {"torch DCP"}
    assert not list(tmp_path.iterdir())


def test_parts_of_a_chunk_are_read_right_by_both(tmp_path: Path) -> None:
    rows = storage.parts_of_a_chunk(64, tmp_path, 1)
    assert len(rows) == 4


def test_sums_and_conversions_are_compared_with_plain_file_operations(tmp_path: Path) -> None:
    rows = formats.sums_and_conversions({"w": torch.randn(64, 3)}, tmp_path, 1)
    assert len(rows) == 9
    assert all(row.bound is not None or row.goal is not None for row in rows)
    assert not list(tmp_path.iterdir())
