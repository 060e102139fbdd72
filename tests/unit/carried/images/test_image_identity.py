"""Identity of files that processes write to by their memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remesh.carried.images.form import identity
from remesh.carried.images.form.identity import Identities


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were hashed."""
    paths: list[str] = []
    monkeypatch.setattr(identity, "hash_of", lambda path, num_bytes: paths.append(path) or f"hash {len(paths)}")
    monkeypatch.setattr(identity, "is_in_memory", lambda path: False)
    return paths


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "table"
    path.write_bytes(bytes(100))
    return str(path)


def test_a_file_that_was_written_just_now_is_hashed_each_time(hashed: list[str], table: str) -> None:
    known = Identities()
    known.of(table)
    assert [known.of_written(table).sha256 for _ in range(2)] == ["hash 2", "hash 3"]


def test_a_file_that_nobody_writes_any_more_is_hashed_once(hashed: list[str], table: str) -> None:
    known = Identities()
    os.utime(table, ns=(1, 1))
    assert [known.of_written(table).sha256 for _ in range(2)] == ["hash 1", "hash 1"]
    os.utime(table, ns=(2, 2))
    assert known.of_written(table).sha256 == "hash 2"


def test_a_file_in_memory_is_hashed_each_time(hashed: list[str], table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "is_in_memory", lambda path: True)
    os.utime(table, ns=(1, 1))
    known = Identities()
    assert [known.of_written(table).sha256 for _ in range(2)] == ["hash 1", "hash 2"]


def test_what_an_older_hash_says_of_a_written_file_is_not_believed(hashed: list[str], table: str) -> None:
    """It was taken before the file was mapped for writing, and may have its time still."""
    known = Identities()
    os.utime(table, ns=(1, 1))
    assert (known.of(table).sha256, known.of_written(table).sha256) == ("hash 1", "hash 2")
