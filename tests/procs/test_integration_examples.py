"""The examples of hosts that need torch alone run as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "integrations"


@pytest.mark.procs
@pytest.mark.timeout(200)
def test_torchs_recipe_goes_on_with_the_same_losses_on_another_number_of_ranks() -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(_EXAMPLES / "dcp.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    trained, loaded = (line.partition("losses ")[2] for line in done.stdout.splitlines())
    found = [tuple(map(float, losses.split(", "))) for losses in (trained, loaded)]
    assert found[1] == pytest.approx(found[0], rel=1e-4), done.stdout
