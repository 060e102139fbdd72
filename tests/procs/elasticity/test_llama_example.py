"""The Llama under FSDP2 x TP x PP loses a node, goes on as another mesh, and gets the node back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "llama" / "run.py"


@pytest.mark.long
def test_a_llama_goes_on_when_a_node_is_killed_and_comes_back(tmp_path: Path) -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), "--steps", "60", "--folder", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    meshes = re.findall(r"^mesh (.*) from step", run.stdout, re.MULTILINE)
    assert meshes[:2] == ["pp=2 x dp=1 x tp=2", "pp=1 x dp=1 x tp=2"], run.stdout
    losses = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss (\S+)", run.stdout, re.MULTILINE)}
    assert sorted(losses) == list(range(1, 61))
    assert losses[60] < losses[1] - 1.0
