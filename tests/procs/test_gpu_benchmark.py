"""The benchmark of devices runs on the CPU, small, as torchrun starts it: every row comes, or says why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import ROWS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.procs
def test_every_row_is_measured_or_says_by_name_that_it_is_not() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, "-m", "benchmarks.gpu", "--device", "cpu"],
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = {case: line for case in ROWS for line in run.stdout.splitlines() if line.startswith(case)}
    assert lines.keys() == ROWS.keys()
    assert [case for case, line in lines.items() if "not run" in line] == ["worker killed to next step, s"]
