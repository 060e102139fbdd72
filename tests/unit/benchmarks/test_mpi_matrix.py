"""The matrix of restarts, run in parts: together they are the whole, and a broken job is not called good."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.mpi import matrix, tables
from benchmarks.mpi.chain import ALL, Config, Walk
from benchmarks.mpi.matrix_programs import Program

_BROKEN_SEED = matrix.SEED + 3


def _walk(argv: Sequence[str], _environment: Mapping[str, str], configs: Sequence[Config], seed: int) -> Walk:
    answer = "wrong" if seed == _BROKEN_SEED else f"answer of {argv[0]}"
    return Walk(tuple(configs), answer, "finished", {"ranks held": 2}, cut_s=(0.01,) * (len(configs) - 1))


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(matrix, "OUT", tmp_path)
    monkeypatch.setattr(matrix, "_TOLD", tmp_path / "mpi_walks.json")
    monkeypatch.setattr(matrix, "run_command", _walk)
    monkeypatch.setattr(matrix, "make_programs", lambda folder: {language: [_program(language)] for language in "AB"})
    monkeypatch.setattr(Program, "native_answer", lambda self: f"answer of {self.name}")
    monkeypatch.setattr(matrix, "describe_run", lambda seed: {**_DESCRIBED, "seed": seed})
    monkeypatch.setattr(
        matrix, "save_report", lambda room, rows, seed: report.save_report(room, rows, seed, folder=tmp_path)
    )
    return tmp_path


def _program(name: str) -> Program:
    return Program(name, (name,), {}, ((name,), {}))


_DESCRIBED = report.describe_run(None)


@pytest.mark.procs
def test_parts_make_the_whole(out: Path) -> None:
    for part in ("1/3", "2/3", "3/3"):
        matrix.main([part])
    pairs = json.loads((out / "mpi_pairs.json").read_text())
    whole = json.loads((out / "mpi_matrix.json").read_text())
    num_pairs = len(ALL) * (len(ALL) - 1)
    assert {language: len(of) for language, of in pairs["pairs"].items()} == {"A": num_pairs, "B": num_pairs}
    assert sum(pairs["pairs"]["A"].values()) == num_pairs - matrix.SEGMENT
    assert all(pairs["pairs"]["B"].values())
    share = whole["rows"][0]
    assert share["value"] == pytest.approx(1 - matrix.SEGMENT / (2 * num_pairs + 60)) and not share["ok"]
    page = tables.make_page(pairs, whole)
    assert page.count("**x**") == matrix.SEGMENT and "·" not in page.split("| 1 |")[1]


@pytest.mark.procs
def test_what_was_run_on_another_commit_does_not_count(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix.main(["1/21"])
    monkeypatch.setattr(matrix, "describe_run", lambda seed: {**_DESCRIBED, "commit": "another", "seed": seed})
    matrix.main(["2/21"])
    pairs = json.loads((out / "mpi_pairs.json").read_text())
    assert len(pairs["pairs"]["A"]) == matrix.SEGMENT
