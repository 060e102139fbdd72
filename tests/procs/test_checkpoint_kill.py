"""Ranks killed at any instant of a save: afterwards a complete checkpoint is there, and nothing is half-visible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = Path(__file__).with_name("scripts") / "killed_jobs.py"


def kill_and_look(folder: Path, num_trials: int, seed: int, patience_s: float) -> str:
    """What the trials left, in words; AssertionError with the output of a failed one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), str(folder), str(num_trials), str(seed)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout.strip()


@pytest.mark.procs
def test_some_kills_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    assert "12 kills" in kill_and_look(tmp_path, 12, 1, 110)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_hundred_kills_leave_a_complete_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = kill_and_look(tmp_path, 204, 2, 1400)
    with capsys.disabled():
        print(f"\n{said}")
    assert "204 kills" in said
