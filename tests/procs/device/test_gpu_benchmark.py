"""The benchmark of devices runs on the CPU, small, as torchrun starts it: every row comes, or says why not."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from benchmarks.gpu import kills
from benchmarks.gpu.__main__ import ROWS, main
from benchmarks.report import OUT

ROOT = Path(__file__).resolve().parents[3]
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
    of_several = [case for case in ROWS if any(what in case for what in ("reshard", "weights", "pipeline"))]
    assert lacking == (of_several if num_ranks == 1 else [])
    assert all("needs 2 ranks, found 1" in lines[case] for case in lacking)


def test_jobs_that_it_starts_know_nothing_of_the_torchrun_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_by_torchrun = set(re.findall(r'"([A-Z_]+)": ', inspect.getsource(LocalElasticAgent._start_workers)))
    assert {"RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCH_NCCL_ASYNC_ERROR_HANDLING"} <= set_by_torchrun
    for name in set_by_torchrun:
        monkeypatch.setenv(name, "1")
    with kills._own_environment({}):
        assert not set_by_torchrun & os.environ.keys()
    assert set_by_torchrun <= os.environ.keys()


def test_without_a_gpu_every_row_says_so_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main()
    *rows, hint = capsys.readouterr().out.splitlines()
    assert rows == [f"{case:<42} not run: no GPU" for case in ROWS]
    assert "--device cpu" in hint
