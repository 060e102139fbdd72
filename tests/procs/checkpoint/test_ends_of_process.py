"""The last background save of a program is there, whatever way the program ends; a fork has no part in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import remesh

pytestmark = pytest.mark.procs
_ROOT = Path(__file__).parents[3]
_SCRIPT = Path(__file__).parents[1] / "scripts" / "ends_of_process.py"
_LAST_SAVES = _SCRIPT.with_name("last_saves.py")
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


def _codes_of_two(folder: Path, way: str) -> list[int]:
    command = [sys.executable, str(_LAST_SAVES), str(folder)]
    ranks = [subprocess.Popen([*command, rank, way]) for rank in ("0", "1")]
    return [rank.wait(_LONGEST_S) for rank in ranks]


@pytest.mark.parametrize(
    "way",
    [
        *("destroyed", "destroyed_by_manager", "destroyed_of_some", "never_destroyed", "destroyed_at_exit"),
        *("met_again", "failed_and_made_up_for"),
    ],
)
def test_a_save_of_two_ranks_outlives_their_group(tmp_path: Path, way: str) -> None:
    assert _codes_of_two(tmp_path, way) == [0, 0]
    for folder in ("step-00000000", *(["before"] if way == "met_again" else [])):
        found = {"w": torch.zeros(1000)}
        remesh.load(found, tmp_path / folder)
        assert torch.equal(found["w"], torch.arange(1000.0))


@pytest.mark.parametrize(("way", "code"), [("queued", 1), ("failed", 1), ("failed_and_asked", 0)])
def test_a_program_that_loses_its_last_save_unheard_does_not_end_well(tmp_path: Path, way: str, code: int) -> None:
    assert _codes_of_two(tmp_path, way) == [code, code]
