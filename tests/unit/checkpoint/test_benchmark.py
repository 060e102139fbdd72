"""The benchmarks of the room run, tiny, and compare what they say they compare."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.checkpoint import background, formats, loads, planning, storage
from benchmarks.pages import PAGES


def test_saves_and_loads_are_compared(tmp_path: Path) -> None:
    state = {f"t{at}": torch.randn(10, 3) for at in range(3)}
    rows = storage.save_and_load("tiny", state, tmp_path, 1, (None, 1.0, 1.0))
    assert all(row.value > 0 for row in rows)
    assert {row.peer for row in rows if row.goal is not None} == {"torch DCP"}
    assert not list(tmp_path.iterdir())


def test_loads_are_compared(tmp_path: Path) -> None:
    seconds = loads.seconds_of_loads({"w": torch.randn(10, 3)}, tmp_path, 1)
    assert len(seconds) == 3 and min(seconds) > 0


def test_parts_of_a_chunk_are_read_right_by_both(tmp_path: Path) -> None:
    rows = storage.parts_of_a_chunk(64, tmp_path, 1)
    assert len(rows) == 4


def test_both_forms_of_an_index_are_read(tmp_path: Path) -> None:
    rows = storage.reading_the_index(4, 5, tmp_path, 1)
    assert [row.case for row in rows] == [
        "an index of 20 chunks: load, the pickle over the columns",
        "an index of 20 chunks: load",
    ]
    assert not list(tmp_path.iterdir())


def test_sums_and_conversions_are_compared_with_plain_file_operations(tmp_path: Path) -> None:
    rows = formats.sums_and_conversions({"w": torch.randn(64, 3)}, tmp_path, 1)
    assert len(rows) == 9
    assert all(row.bound is not None or row.goal is not None for row in rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.procs
def test_time_that_a_background_save_blocks_is_told(tmp_path: Path) -> None:
    rows = background.blocked_time({"w": torch.randn(100, 3)}, tmp_path, 1, workers=("thread",))
    assert [row.unit for row in rows] == ["ratio", "ratio", "ratio", "s", "ratio", "ratio"]
    assert not list(tmp_path.iterdir())


@pytest.mark.procs
def test_planning_is_timed_with_and_without_a_plan_and_drawn() -> None:
    rows = planning.planning(8, 20, (60.0, 60.0))
    assert [row.ok for row in rows] == [True, True, None, None, None]
    rows = [row for size in (8, 16) for row in (*planning.planning(size, 20), *planning.sharing(size, 20))]
    rows.append(planning.growth(rows, 8, 16, 20))
    report = {"rows": [asdict(row) for row in rows]}
    (page,) = (page for page in PAGES if page.name == "checkpoint/planning")
    table, found = page.tables["ranks"], page.find(report)
    assert [line[:10] for line in table.lines(found["ranks"])[2:]] == ["| 8 | 20 |", "| 16 | 20 "]
    assert [row.case for _, row in found["growth"]] == ["cost from 8 to 16 ranks, over linear"]
    assert table.picture is not None
    assert len(ElementTree.fromstring(table.picture.draw(found["ranks"])).findall("{*}polyline")) == 5
