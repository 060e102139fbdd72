"""The matrix of restarts, run in parts: together they are the whole, and a broken job is not called good."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.mpi import matrix, tables
from benchmarks.mpi.chain import ALL, Config, Walk

_BROKEN_SEED = matrix.SEED + 3


def _walk(program: str, _steps: int, _pause_s: float, configs: Sequence[Config], seed: int) -> Walk:
    answer = "wrong" if seed == _BROKEN_SEED else f"answer of {program}"
    return Walk(tuple(configs), answer, "finished", {"ranks held": 2}, cut_s=(0.01,) * (len(configs) - 1))


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(matrix, "OUT", tmp_path)
    monkeypatch.setattr(matrix, "_TOLD", tmp_path / "mpi_walks.json")
    monkeypatch.setattr(matrix, "run_chain", _walk)
    monkeypatch.setattr(matrix, "answer_of", lambda program, steps: f"answer of {program}")
    monkeypatch.setattr(matrix, "describe_run", lambda seed: {**_DESCRIBED, "seed": seed})
    monkeypatch.setattr(
        matrix, "save_report", lambda room, rows, seed: report.save_report(room, rows, seed, folder=tmp_path)
    )
    return tmp_path


_DESCRIBED = report.describe_run(None)


@pytest.mark.procs
def test_parts_make_the_whole(out: Path) -> None:
    for part in ("1/3", "2/3", "3/3"):
        matrix.main([part])
    pairs = json.loads((out / "mpi_pairs.json").read_text())
    whole = json.loads((out / "mpi_matrix.json").read_text())
    assert len(pairs["pairs"]) == len(ALL) * (len(ALL) - 1)
    assert sum(pairs["pairs"].values()) == len(pairs["pairs"]) - matrix.SEGMENT
    share = whole["rows"][0]
    assert share["value"] == pytest.approx(1 - matrix.SEGMENT / (len(pairs["pairs"]) + 60)) and not share["ok"]
    page = tables.make_page(pairs, whole)
    assert "**x**" in page and "·" not in page.split("| 1 |")[1]


@pytest.mark.procs
def test_what_was_run_on_another_commit_does_not_count(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix.main(["1/21"])
    monkeypatch.setattr(matrix, "describe_run", lambda seed: {**_DESCRIBED, "commit": "another", "seed": seed})
    matrix.main(["2/21"])
    pairs = json.loads((out / "mpi_pairs.json").read_text())
    assert len(pairs["pairs"]) == matrix.SEGMENT
