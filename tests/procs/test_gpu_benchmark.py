"""The benchmark of devices runs on the CPU, small, as torchrun starts it: every row comes, or says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import ROWS, main
from benchmarks.report import OUT

ROOT = Path(__file__).resolve().parents[2]
KILLED = "worker killed to next step, s"


def run(num_ranks: int, *flags: str) -> dict[str, str]:
    """The line of each row."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    run = subprocess.run(
        [sys.executable, *torchrun * (num_ranks > 1), "-m", "benchmarks.gpu", "--device", "cpu", *flags],
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = {case: line for case in ROWS for line in run.stdout.splitlines() if line.startswith(case)}
    assert lines.keys() == ROWS.keys()
    report = json.loads((OUT / "gpu-cpu.json").read_text())
    assert (report["devices"], report["world_size"], report["num_hosts"]) == (["CPU"], num_ranks, 1)
    assert {row["case"]: not row["not_run"] for row in report["rows"]} == {
        case: "not run" not in line for case, line in lines.items()
    }
    return lines


@pytest.mark.slow
@pytest.mark.procs
def test_every_row_is_measured_or_says_by_name_that_it_is_not() -> None:
    quick = [flag for case in ROWS if case != KILLED for flag in ("--row", case)]
    lines = run(2, *quick)
    assert {case: line for case, line in lines.items() if "not run" in line} == {
        KILLED: f"{KILLED:<42} not run: not asked for"
    }


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_every_row_is_measured_on_as_many_ranks_as_there_are(num_ranks: int) -> None:
    lines = run(num_ranks)
    lacking = [case for case, line in lines.items() if "not run" in line]
    assert lacking == ([case for case in ROWS if "reshard" in case or "weights" in case] if num_ranks == 1 else [])
    assert all("needs 2 ranks, found 1" in lines[case] for case in lacking)


def test_without_a_gpu_every_row_says_so_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main()
    *rows, hint = capsys.readouterr().out.splitlines()
    assert rows == [f"{case:<42} not run: no GPU" for case in ROWS]
    assert "--device cpu" in hint
