"""Memory that ranks share comes into a checkpoint once, when all stand still, and back for those who stay together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remesh.carried.hosts.shared_folder import SharedFolder
from remesh.carried.mpi.lower.shared_memory import FOLDER, begin_cut, bring_back, check_here, shared_files
from remesh.carried.mpi.together import check_together, sharing_ranks
from remesh.foundation.errors import ConfigError, Error, FormatError, PeerError
from remesh.foundation.linux.proc_text import parse_maps

pytestmark = pytest.mark.procs
_BYTES = bytes(range(256)) * 40


@pytest.fixture
def rooms(tmp_path: Path) -> Iterator[list[SharedFolder]]:
    """Three ranks of one host that share a file."""
    made = [
        SharedFolder.enter("a stay", rank, tmp_path / "memory") for rank in range(3) if _folder(tmp_path / "memory")
    ]
    (made[0].windows / "7").write_bytes(_BYTES)
    yield made
    for room in made:
        room.leave()


def _folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


def _cut_all(rooms: list[SharedFolder], part: Path, failing: int | None = None) -> dict[int, Any]:
    """What each rank says: a report, nothing, or what went wrong."""
    told: dict[int, Any] = {}

    def be(room: SharedFolder) -> None:
        cut = begin_cut(room, part)
        assert cut is not None
        if room.rank == failing:
            cut.give_up("it did not stop")
            return
        try:
            cut.mark()
            told[room.rank] = cut.copy() if cut.is_first else cut.wait()
        except Error as error:
            told[room.rank] = error

    threads = [threading.Thread(target=be, args=(room,)) for room in rooms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_the_first_rank_copies_and_nobody_goes_on_before(rooms: list[SharedFolder], tmp_path: Path) -> None:
    part = _folder(tmp_path / "part")
    told = _cut_all(rooms, part)
    assert set(told[0]) == {"7"} and told[0]["7"]["num_bytes"] == len(_BYTES) and told[1] is told[2] is None
    assert (part / FOLDER / "7").read_bytes() == _BYTES


def test_a_rank_that_does_not_stop_is_named_to_all_at_once(rooms: list[SharedFolder], tmp_path: Path) -> None:
    told = _cut_all(rooms, _folder(tmp_path / "part"), failing=1)
    assert set(told) == {0, 2}
    for error in told.values():
        assert isinstance(error, PeerError) and "rank 1: it did not stop" in str(error)


def test_ranks_that_share_nothing_do_not_wait_for_each_other(rooms: list[SharedFolder], tmp_path: Path) -> None:
    (rooms[0].windows / "7").unlink()
    assert begin_cut(rooms[1], tmp_path) is None


def _manifest(rooms: list[SharedFolder], part: Path) -> dict[str, dict[str, Any]]:
    report = _cut_all(rooms, part)[0]
    return {
        "rank-0000": {"shared": report},
        "rank-0001": {"shares": ["7"]},
        "rank-0002": {"shares": ["7"]},
    }


def test_the_first_who_had_it_brings_it_back_and_all_find_it(rooms: list[SharedFolder], tmp_path: Path) -> None:
    part = _folder(tmp_path / "part")
    ranks = _manifest(rooms, part)
    (rooms[0].windows / "7").unlink()
    bring_back(rooms[0], part, ranks)
    with pytest.raises(ConfigError, match="ranks 1, 2 share memory .* rank 1 is not on this one"):
        check_here(rooms[2], ranks)
    bring_back(rooms[1], part, ranks)
    assert (rooms[2].windows / "7").read_bytes() == _BYTES
    for room in rooms:
        check_here(room, ranks)


def test_a_copy_that_was_changed_is_refused(rooms: list[SharedFolder], tmp_path: Path) -> None:
    part = _folder(tmp_path / "part")
    ranks = _manifest(rooms, part)
    (rooms[0].windows / "7").unlink()
    (part / FOLDER / "7").write_bytes(_BYTES[:-1] + b"!")
    with pytest.raises(FormatError, match="choose another checkpoint"):
        bring_back(rooms[1], part, ranks)


def test_ranks_that_share_memory_must_get_one_host() -> None:
    ranks = {f"rank-{rank:04d}": {"shares": [str(rank // 2)]} if rank < 4 else {} for rank in range(5)}
    assert sharing_ranks(ranks) == {"0": [0, 1], "1": [2, 3]}
    check_together(ranks, ["a", "a", "b", "b", "a"], "restarting")
    with pytest.raises(ConfigError, match="restarting: ranks 2, 3 share .* rank 2 would be on a and rank 3 on b"):
        check_together(ranks, ["a", "a", "a", "b", "b"], "restarting")


def test_shared_files_are_found_in_the_map_of_a_process() -> None:
    lines = [
        "7f0000000000-7f0000001000 rw-s 00000000 00:1f 12 /tmp/.remesh/shared/00ab",
        "7f0000002000-7f0000003000 rw-s 00000000 00:1f 12 /tmp/.remesh/shared/00ab",
        "7f0000004000-7f0000005000 rw-s 00000000 00:1f 13 /tmp/.remesh/channel",
        "7f0000006000-7f0000007000 rw-p 00000000 00:00 0",
    ]
    assert shared_files(parse_maps("\n".join(lines))) == ["00ab"]
