"""Rooms of ranks: what a living one has is never touched, what a killed one left is removed by the next."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from remesh.carried.hosts.rank_folder import clear_rank_folders, make_rank_folder

_KILLED_OWNER = """
import os, signal, sys, pathlib
from remesh.carried.hosts.rank_folder import make_rank_folder
(make_rank_folder(pathlib.Path(sys.argv[1])) / "channel").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.procs
def test_what_a_killed_owner_left_is_removed_by_the_next_and_that_of_living_ones_kept(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _KILLED_OWNER, tmp_path], check=False, timeout=60)
    (left,) = tmp_path.iterdir()
    assert (left / "channel").exists()
    first, second = make_rank_folder(tmp_path), make_rank_folder(tmp_path)
    assert set(tmp_path.iterdir()) == {first, second}


def test_a_room_that_somebody_has_locked_is_kept_whatever_its_name_is(tmp_path: Path) -> None:
    room = tmp_path / "remesh-rank-room-of-another-container"
    room.mkdir()
    lock = os.open(room, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    clear_rank_folders(tmp_path)
    assert room.exists()
    os.close(lock)
    clear_rank_folders(tmp_path)
    assert not room.exists()


def test_other_folders_and_rooms_that_are_being_made_are_left_alone(tmp_path: Path) -> None:
    others = {tmp_path / name for name in (".remesh-rank-room-new", "remesh-rank-123-older", "someone-elses")}
    for other in others:
        other.mkdir()
    (tmp_path / "remesh-rank-room-file").touch()
    (tmp_path / "remesh-rank-room-link").symlink_to("someone-elses")
    clear_rank_folders(tmp_path)
    assert others <= set(tmp_path.iterdir())
    assert (tmp_path / "remesh-rank-room-file").exists() and (tmp_path / "remesh-rank-room-link").is_symlink()
