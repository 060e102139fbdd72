"""Of two jobs that save into one directory one checkpoint is there, whole, and the other job is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = Path(__file__).with_name("scripts") / "two_jobs.py"
_PATIENCE_S = 110


@pytest.mark.procs
def test_of_two_jobs_that_save_into_one_directory_one_is_there_and_the_other_is_told(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), str(tmp_path), "17", "8"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "8 trials" in done.stdout
