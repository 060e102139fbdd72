"""The example runs as its first lines say, and its generator's logits are the trainer's to the last bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "refit" / "run.py"


@pytest.mark.procs
def test_a_generator_under_another_tensor_parallelism_gives_the_logits_of_the_trainer() -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), "--versions", "3", "--steps", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("version")]
    assert len(lines) == 3
    assert all("logits equal to the last bit on 7 ranks" in line and "1 plan made" in line for line in lines)
