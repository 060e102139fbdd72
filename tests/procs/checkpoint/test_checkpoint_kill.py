"""Ranks killed at any instant of a save: afterwards a complete checkpoint is there, and nothing is half-visible."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.procs.forked_programs import run_program
from tests.profiles import so_many

_WAYS = ("sync", "fully parallel", "older ones removed", "async")
_SCRIPT = Path(__file__).parents[1] / "scripts" / "killed_jobs.py"


def kill_and_look(folder: Path, num_trials: int, seed: int, *ways: str) -> str:
    """What the trials left, in words; AssertionError with the output of a failed one."""
    return run_program(_SCRIPT, folder, str(folder), str(num_trials), str(seed), *ways).strip()


@pytest.mark.procs
def test_some_kills_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    num = so_many(12, quick=3)
    assert f"{num} kills" in kill_and_look(tmp_path, num, 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("way", _WAYS)
def test_two_hundred_kills_leave_a_complete_checkpoint(
    tmp_path: Path, seed: int, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = kill_and_look(tmp_path, 17, 10 * seed + _WAYS.index(way), way)  # of 204
    with capsys.disabled():
        print(f"\n{said}")
    assert f"17 {way}" in said
