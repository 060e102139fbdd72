"""The report of a benchmark: rows keep their verdict, the file has what is needed to judge them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import Row, at_least, at_most, write_report


@pytest.mark.procs
def test_a_row_that_misses_its_goal_stays_in(tmp_path: Path) -> None:
    rows = [at_most("fast", 1.0, "s", 2.0), at_most("slow", 3.0, "s", 2.0), at_least("share", 0.5, "ratio", 0.9)]
    path = write_report("room", rows, seed=7, folder=tmp_path)
    report = json.loads(path.read_text())
    assert [row["ok"] for row in report["rows"]] == [True, False, False]
    assert set(report["rows"][0]) == {"case", "value", "unit", "goal", "ok", "peer", "bound", "spread"}
    assert report["seed"] == 7
    assert {"commit", "machine", "load", "load_before", "versions"} <= set(report)


def test_a_goal_needs_a_verdict() -> None:
    with pytest.raises(ValueError, match="must both be there"):
        Row("case", 1.0, "s", goal=2.0)
