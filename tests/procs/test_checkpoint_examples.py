"""The examples of the guides run as their first lines say, and what they load is what was saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLES = _ROOT / "examples" / "checkpoint"


def run(name: str) -> list[str]:
    """Lines that an example prints."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(_EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.procs
@pytest.mark.timeout(320)
def test_a_program_of_megatron_core_runs_with_other_imports() -> None:
    said = "\n".join(run("megatron.py"))  # ranks may interrupt each other between a line and its end
    assert said.count("weights and Adam's moments are those of the whole model, under TP 4") == 4


@pytest.mark.procs
@pytest.mark.timeout(320)
def test_a_plain_program_goes_on_from_a_checkpoint_on_another_mesh() -> None:
    losses = {line.split(":")[0]: line.split("losses ")[1] for line in run("plain.py") if line.startswith("mesh")}
    assert set(losses) == {"mesh 2x2, trained", "mesh 2x2, loaded", "mesh 2, loaded"}
    found = [tuple(map(float, text.split(", "))) for text in losses.values()]
    assert all(one == pytest.approx(found[0], rel=1e-5) for one in found), losses
