"""The folder that ranks of a host have in common is there as long as one of them is, and only for their user."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from remesh.carried.hosts.rank_folder import clear_rank_folders, make_rank_folder
from remesh.carried.hosts.shared_folder import SharedFolder, host_folder
from remesh.foundation.errors import StorageError

_KILLED_RANK = """
import os, signal, sys, pathlib
from remesh.carried.hosts.shared_folder import SharedFolder
(SharedFolder.enter("a stay", 1, pathlib.Path(sys.argv[1])).windows / "7").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_all_ranks_of_a_stay_find_one_folder_and_the_last_removes_it(tmp_path: Path) -> None:
    rooms = [SharedFolder.enter("a stay", rank, tmp_path) for rank in (2, 0, 11)]
    other = SharedFolder.enter("another stay", 1, tmp_path)
    assert {room.path for room in rooms} == {host_folder("a stay", tmp_path)} and other.path != rooms[0].path
    assert rooms[0].ranks() == [0, 2, 11] and other.ranks() == [1]
    for room in rooms:
        assert room.windows.is_dir()
        clear_rank_folders(tmp_path)
        room.leave()
    assert list(tmp_path.iterdir()) == [other.path]
    other.leave()
    other.leave()
    assert not list(tmp_path.iterdir())


@pytest.mark.procs
def test_what_killed_ranks_left_falls_to_the_next_on_the_host(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _KILLED_RANK, tmp_path], check=False, timeout=60)
    assert (host_folder("a stay", tmp_path) / "windows" / "7").exists()
    room = make_rank_folder(tmp_path)
    assert list(tmp_path.iterdir()) == [room]


def test_a_folder_that_is_cleared_away_while_a_rank_enters_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its lock it belongs to nobody."""

    def cleared_before(path: Path, flags: int) -> int:
        monkeypatch.undo()
        clear_rank_folders(tmp_path)
        assert not path.exists()
        return os.open(path, flags)

    monkeypatch.setattr(os, "open", cleared_before)
    assert SharedFolder.enter("a stay", 3, tmp_path).ranks() == [3]


def test_who_clears_away_leaves_a_folder_that_others_have_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_folder("a stay", tmp_path).mkdir()
    entered = []

    def others_first(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        clear_rank_folders(tmp_path)
        entered.append(SharedFolder.enter("a stay", 3, tmp_path))
        fcntl.flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", others_first)
    clear_rank_folders(tmp_path)
    assert [room.ranks() for room in entered] == [[3]]


def test_a_folder_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    host_folder("a stay", tmp_path).symlink_to(elsewhere)
    with pytest.raises(StorageError, match="for the ranks of this host"):
        SharedFolder.enter("a stay", 0, tmp_path)
    assert not any(elsewhere.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    path = host_folder("a stay", tmp_path)
    path.mkdir()
    os.chown(path, 12345, 12345)
    with pytest.raises(StorageError, match="belongs to user 12345"):
        SharedFolder.enter("a stay", 0, tmp_path)
