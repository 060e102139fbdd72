"""Files are hashed once as long as they are not changed, whatever a change leaves of their length and time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remesh.carried.images.form import identity
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
    """Files that were not changed of late."""
    paths = [tmp_path / name for name in ("short", "middle", "long")]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(100 + number))
        os.utime(path, ns=(1, 1))
    return [str(path) for path in paths]


def test_what_was_gathered_is_not_hashed_again(hashed: list[str], files: list[str]) -> None:
    known = Identities()
    known.gather(files)
    known.gather(files)
    assert known.of(files[0]) == known.of(files[0])
    assert hashed == ["short", "middle", "long"]


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
    hashed: list[str], files: list[str], change: object
) -> None:
    known = Identities()
    known.gather(files[:1])
    assert callable(change)
    change(Path(files[0]))
    known.of(files[0])
    assert hashed == ["short"] * 2


def test_a_file_that_changes_while_it_is_hashed_is_hashed_again(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = []

    def hash_and_change(path: str, num_bytes: int) -> str:
        hashed.append(path)
        _rewrite(Path(path))
        return "0" * 64

    monkeypatch.setattr(identity, "hash_of", hash_and_change)
    known = Identities()
    known.gather(files[:1])
    known.of(files[0])
    assert hashed == files[:1] * 2


def test_a_file_that_was_changed_just_now_is_hashed_again(hashed: list[str], files: list[str]) -> None:
    Path(files[0]).write_bytes(b"1")
    known = Identities()
    known.gather(files[:1])
    known.of(files[0])
    assert hashed == ["short"] * 2


def test_what_is_gone_hides_no_other(hashed: list[str], files: list[str]) -> None:
    Path(files[1]).unlink()
    Identities().gather(files)
    assert hashed == ["short", "long"]
