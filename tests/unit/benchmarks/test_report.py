"""The report of a benchmark: rows keep their verdict, the file has what is needed to judge them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import remesh
from benchmarks.report import Row, at_least, at_most, header_of, write_report
from tests.unit.benchmarks.described import DESCRIBED


@pytest.mark.procs
def test_a_row_that_misses_its_goal_stays_in(tmp_path: Path) -> None:
    rows = [at_most("fast", 1.0, "s", 2.0), at_most("slow", 3.0, "s", 2.0), at_least("share", 0.5, "ratio", 0.9)]
    path = write_report("room", rows, seed=7, folder=tmp_path)
    report = json.loads(path.read_text())
    assert [row["ok"] for row in report["rows"]] == [True, False, False]
    assert set(report["rows"][0]) == {"case", "value", "unit", "goal", "ok", "peer", "bound", "spread"}
    assert report["seed"] == 7
    assert {"commit", "machine", "load", "load_before", "versions"} <= set(report)
    assert report["versions"]["remesh"] == remesh.__version__


def test_the_header_of_a_page_says_what_a_number_needs_to_be_judged() -> None:
    told = header_of(DESCRIBED, "make bench ROOM=layout", "five, the median")
    for part in ("make bench ROOM=layout", "0123456789ab", "2 cores, Linux-6.1", "Python 3.11.7", "torch 2.13.0"):
        assert part in told
    assert "load 0.1, 0.2, 0.3 before, 2.0, 1.0, 0.5 after" in told
    assert "Runs: five, the median" in told


def test_a_goal_needs_a_verdict() -> None:
    with pytest.raises(ValueError, match="must both be there"):
        Row("case", 1.0, "s", goal=2.0)
