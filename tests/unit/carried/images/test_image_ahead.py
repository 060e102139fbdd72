"""Hashes of what a program has mapped are there before it stands still."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from remesh.carried.images.form import identity
from remesh.carried.images.form.identity import Identities
from remesh.carried.images.look import ahead
from remesh.carried.images.look.capture import mapped_files
from remesh.foundation.linux.procfs import read_areas


def test_files_that_were_hashed_ahead_are_not_hashed_for_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, hashed = Identities(), []

    def hash_and_note(path: str, num_bytes: int) -> str:
        hashed.append(path)
        return "its hash"

    monkeypatch.setattr(ahead, "IDENTITIES", known)
    monkeypatch.setattr(identity, "hash_of", hash_and_note)
    path = tmp_path / "library"
    path.write_bytes(b"code" * 4096)
    os.utime(path, ns=(1, 1))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ):
        ahead.start_hashing_ahead(os.getpid(), (0,)).join()
        assert any(each.endswith(str(path)) for each in hashed)
        hashed.clear()
        assert mapped_files(os.getpid(), read_areas(os.getpid()), known, {})[str(path)].sha256 == "its hash"
        assert not [each for each in hashed if each.endswith(str(path))]


def test_a_mapped_file_that_is_gone_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "IDENTITIES", known := Identities())
    monkeypatch.setattr(identity, "hash_of", lambda path, num_bytes: path)
    paths = [tmp_path / name for name in ("first", "second", "third")]
    maps = []
    for path in paths:
        path.write_bytes(bytes(4096))
        os.utime(path, ns=(1, 1))
        with path.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
    paths[1].unlink()
    ahead.hash_ahead(os.getpid())
    for each in maps:
        each.close()
    found = " ".join(known._known.values())
    assert str(paths[0]) in found and str(paths[2]) in found


def test_the_thread_that_hashes_leaves_most_of_the_processors_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    nice = []
    monkeypatch.setattr(ahead, "hash_ahead", lambda pid: nice.append(os.getpriority(os.PRIO_PROCESS, 0)))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    ahead.start_hashing_ahead(os.getpid(), (0,)).join()
    assert nice == [10]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_of_a_process_that_has_ended() -> None:
    ahead.start_hashing_ahead((1 << 22) + 1, (0,)).join()
