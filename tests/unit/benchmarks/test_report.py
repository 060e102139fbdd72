"""The report of a benchmark: rows keep their verdict, the file has what is needed to judge them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import remesh
from benchmarks import report as reports
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
    assert report["versions"]["remesh"] == remesh.__version__


def test_a_goal_needs_a_verdict() -> None:
    with pytest.raises(ValueError, match="must both be there"):
        Row("case", 1.0, "s", goal=2.0)


@pytest.mark.procs
def test_a_commit_has_a_mark_when_more_than_pages_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_ROOT", tmp_path)
    assert reports.find_commit() is None
    named = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), (*named, "commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    commit = reports.find_commit()
    assert commit is not None and not commit.endswith("+")
    for page in ("docs/room.svg", "README.md"):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).touch()
    assert reports.find_commit() == commit
    (tmp_path / "code.py").touch()
    assert reports.find_commit() == f"{commit}+"
