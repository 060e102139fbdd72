"""The last background save of a program is there, whatever way the program ends; a fork has no part in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.procs
_ROOT = Path(__file__).parents[3]
_SCRIPT = Path(__file__).parents[1] / "scripts" / "ends_of_process.py"
_LONGEST_S = 900


@pytest.mark.parametrize(
    ("entry", "num_ways"),
    [
        ("save", 10),
        pytest.param("save_by_manager", 10, marks=pytest.mark.slow),
        pytest.param("save_by_queue", 10, marks=pytest.mark.slow),
        pytest.param("save_by_worker", 10, marks=pytest.mark.slow),
        pytest.param("save_by_torch", 7, marks=pytest.mark.slow),
    ],
)
def test_a_save_under_way_at_the_end_is_there_afterwards(tmp_path: Path, entry: str, num_ways: int) -> None:
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), str(tmp_path), entry],
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )
    assert not done.returncode, done.stderr
    assert len(json.loads(done.stdout)) == num_ways
