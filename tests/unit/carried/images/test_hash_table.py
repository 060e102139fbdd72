"""Processes of a host divide the files that they hash, and believe each other only of files that have not changed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from remesh.carried.images.form import identity
from remesh.carried.images.form.hash_table import FileState, HashTable, Urgency
from remesh.carried.images.form.identity import Identities


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were hashed."""
    names: list[str] = []

    def hash_and_note(path: str, num_bytes: int) -> str:
        names.append(Path(path).name)
        return f"{path} {len(names)}".rjust(64)[:64]

    monkeypatch.setattr(identity, "hash_of", hash_and_note)
    return names


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Files of different lengths, the shortest first, that were not changed of late."""
    paths = [tmp_path / name for name in ("short", "middle", "long")]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(100 + number))
        os.utime(path, ns=(1, 1))
    return [str(path) for path in paths]


@pytest.fixture
def table(tmp_path: Path) -> HashTable:
    (tmp_path / "hashes").mkdir()
    return HashTable(tmp_path / "hashes")


def sharing(table: HashTable) -> Identities:
    known = Identities()
    known.share(table)
    return known


def state_of(path: str) -> FileState:
    return FileState.of(os.stat(path))


def test_what_one_has_hashed_the_others_take_over(hashed: list[str], files: list[str], table: HashTable) -> None:
    first, second = sharing(table), sharing(table)
    first.gather(files, Urgency.AT_ONCE)
    assert hashed == ["long", "middle", "short"]
    second.gather(files, Urgency.AT_ONCE)
    third = sharing(table)
    assert (
        [second.of(path) for path in files] == [first.of(path) for path in files] == [third.of(path) for path in files]
    )
    assert len(hashed) == 3


def test_who_finds_a_file_taken_hashes_another_and_waits_last(
    hashed: list[str], files: list[str], table: HashTable
) -> None:
    others, known = HashTable(table.folder), sharing(table)
    with others.turn(state_of(files[2]), Urgency.AT_ONCE, wait=False) as is_ours:
        assert is_ours
        gathering = threading.Thread(target=known.gather, args=(files, Urgency.AT_ONCE))
        gathering.start()
        while hashed != ["middle", "short"]:
            assert gathering.is_alive()
        others.note(state_of(files[2]), "0" * 64)
    gathering.join()
    assert known.of(files[2]).sha256 == "0" * 64
    assert hashed == ["middle", "short"]


def test_who_stands_still_does_not_wait_for_who_hashes_ahead(
    hashed: list[str], files: list[str], table: HashTable
) -> None:
    known = sharing(table)
    with HashTable(table.folder).turn(state_of(files[2]), Urgency.AHEAD, wait=False):
        known.gather(files, Urgency.AHEAD)
        assert hashed == ["middle", "short"]
        known.gather(files, Urgency.AT_ONCE)
    assert hashed == ["middle", "short", "long"]


@pytest.mark.procs
def test_a_file_of_one_who_was_killed_is_hashed_by_another(
    hashed: list[str], files: list[str], table: HashTable
) -> None:
    program = (
        "import os, signal, sys, pathlib\n"
        "from remesh.carried.images.form.hash_table import FileState, HashTable, Urgency\n"
        "table, state = HashTable(pathlib.Path(sys.argv[1])), FileState.of(os.stat(sys.argv[2]))\n"
        "with table.turn(state, Urgency.AT_ONCE, wait=True):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, table.folder, files[2]], check=False)
    sharing(table).gather(files, Urgency.AT_ONCE)
    assert hashed == ["long", "middle", "short"]


def _rewrite(path: Path) -> None:
    """In place, with the time that the file had."""
    path.write_bytes(b"1" * path.stat().st_size)
    os.utime(path, ns=(1, 1))


def _replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(b"1" * path.stat().st_size)
    os.utime(new, ns=(1, 1))
    new.rename(path)


@pytest.mark.parametrize("change", [_rewrite, _replace])
def test_a_file_that_was_changed_with_the_same_length_and_time_is_hashed_again(
    hashed: list[str], files: list[str], table: HashTable, change: object
) -> None:
    known = sharing(table)
    known.gather(files[:1], Urgency.AHEAD)
    assert callable(change)
    change(Path(files[0]))
    known.of(files[0])
    sharing(table).of(files[0])
    assert hashed == ["short"] * 3


def test_a_file_that_changes_while_it_is_hashed_is_told_to_nobody(
    files: list[str], table: HashTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hash_and_change(path: str, num_bytes: int) -> str:
        _rewrite(Path(path))
        return "0" * 64

    monkeypatch.setattr(identity, "hash_of", hash_and_change)
    known = sharing(table)
    known.gather(files[:1], Urgency.AT_ONCE)
    assert not known._known
    assert table.look_up(state_of(files[0])) is None


def test_a_file_that_was_changed_just_now_is_told_to_nobody(
    hashed: list[str], files: list[str], table: HashTable
) -> None:
    Path(files[0]).write_bytes(b"1")
    known = sharing(table)
    known.gather(files[:1], Urgency.AT_ONCE)
    known.of(files[0])
    assert hashed == ["short"] * 2
    assert not list(table.folder.iterdir())


def test_a_damaged_entry_is_not_believed(hashed: list[str], files: list[str], table: HashTable) -> None:
    (table.folder / f"{state_of(files[0])}").write_text("cut off")
    sharing(table).gather(files[:1], Urgency.AT_ONCE)
    assert hashed == ["short"]


def test_without_its_folder_everybody_hashes_for_himself(hashed: list[str], files: list[str], table: HashTable) -> None:
    table.folder.rmdir()
    for known in (sharing(table), sharing(table)):
        known.gather(files[:1], Urgency.AT_ONCE)
        known.of(files[0])
    assert hashed == ["short"] * 2


def test_what_is_gone_hides_no_other(hashed: list[str], files: list[str], table: HashTable) -> None:
    Path(files[1]).unlink()
    sharing(table).gather(files, Urgency.AT_ONCE)
    assert hashed == ["long", "short"]
