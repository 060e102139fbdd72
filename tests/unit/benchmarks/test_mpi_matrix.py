"""The matrix of restarts, run in parts: together they are the whole, and a broken job is not called good."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mpi import matrix
from benchmarks.mpi.chain import ALL, Config, Walk
from benchmarks.mpi.matrix_programs import Program
from benchmarks.pages import PAGES

_BROKEN_SEED = matrix.SEED + 3


def _walk(argv: Sequence[str], _environment: Mapping[str, str], configs: Sequence[Config], seed: int) -> Walk:
    answer = "wrong" if seed == _BROKEN_SEED else f"answer of {argv[0]}"
    return Walk(tuple(configs), answer, "finished", {"ranks held": 2}, cut_s=(0.01,) * (len(configs) - 1))


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(matrix, "run_command", _walk)
    monkeypatch.setattr(matrix, "make_programs", lambda folder: {language: [_program(language)] for language in "AB"})
    monkeypatch.setattr(Program, "native_answer", lambda self: f"answer of {self.name}")
    return tmp_path


def _program(name: str) -> Program:
    return Program(name, (name,), {}, ((name,), {}))


def _report(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "mpi_matrix.json").read_text())
    return report


@pytest.mark.procs
def test_parts_make_the_whole(out: Path) -> None:
    for part in ("1/3", "2/3", "3/3"):
        matrix.main([part], out)
    report = _report(out)
    pairs = matrix.pairs_of(report["jobs"].values())
    num_pairs = len(ALL) * (len(ALL) - 1)
    assert {language: len(of) for language, of in pairs.items()} == {"A": num_pairs, "B": num_pairs}
    assert sum(pairs["A"].values()) == num_pairs - matrix.SEGMENT
    assert all(pairs["B"].values())
    share = report["rows"][0]
    assert share["value"] == pytest.approx(1 - matrix.SEGMENT / (2 * num_pairs + 60)) and not share["ok"]
    (page,) = (page for page in PAGES if page.name == "mpi/matrix")
    lines = page.tables["pairs"].lines(page.find(report)["pairs"])
    assert len(lines) == 2 + len(ALL)
    assert sum(line.count("**x**") for line in lines) == matrix.SEGMENT and not any("·" in line for line in lines)


@pytest.mark.procs
def test_what_was_run_on_another_commit_does_not_count(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix.main(["1/21"], out)
    monkeypatch.setattr(matrix, "find_commit", lambda: "another")
    matrix.main(["2/21"], out)
    assert len(matrix.pairs_of(_report(out)["jobs"].values())["A"]) == matrix.SEGMENT
