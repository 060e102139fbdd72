"""Check and cut of files that programs write to, and the samples of long ones."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from remesh.carried.images.form.identity import WHOLE_BYTES, hash_of, samples_of
from remesh.carried.images.form.kinds import OpenFilePolicy, WrittenFile
from remesh.carried.images.form.written_files import check_written, cut_written
from remesh.foundation.errors import StorageError

_LONG = WHOLE_BYTES + 123


def _written(path: Path, num_bytes: int, *, is_mapped: bool = False) -> WrittenFile:
    """A file of zeros, which takes no room on the disk."""
    path.touch()
    os.truncate(path, num_bytes)
    mtime_ns = path.stat().st_mtime_ns
    return WrittenFile(str(path), True, is_mapped, num_bytes, mtime_ns, hash_of(str(path), num_bytes))


@pytest.mark.parametrize("num_bytes", [0, 1, WHOLE_BYTES, WHOLE_BYTES + 1, _LONG, 1 << 45])
def test_samples_stand_in_the_file_and_hold_its_beginning_and_its_end(num_bytes: int) -> None:
    pieces = samples_of(num_bytes)
    assert pieces[0][0] == 0 and sum(pieces[-1]) == num_bytes
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(pieces))
    assert sum(length for _, length in pieces) <= WHOLE_BYTES


def test_a_long_file_that_has_grown_is_taken_by_samples_told_and_cut(tmp_path: Path) -> None:
    log = _written(tmp_path / "log", _LONG)
    os.truncate(log.path, _LONG + 1)
    assert check_written([log], OpenFilePolicy.TRUNCATE, "restoring") == [log.path]
    cut_written([log], OpenFilePolicy.TRUNCATE)
    assert os.stat(log.path).st_size == _LONG


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_long_file_that_was_written_in_place_is_refused_between_its_samples_too(
    tmp_path: Path, is_mapped: bool
) -> None:
    table = _written(tmp_path / "table", _LONG, is_mapped=is_mapped)
    assert check_written([table], OpenFilePolicy.TRUNCATE, "restoring") == []
    with open(table.path, "r+b") as file:
        file.seek(next(a + n for (a, n), (b, _) in itertools.pairwise(samples_of(_LONG)) if a + n < b))
        file.write(b"x")
    os.utime(table.path, ns=(1, 1))
    assert hash_of(table.path, _LONG) == table.sha256
    with pytest.raises(StorageError, match=r"table.*has its length of \d+ bytes, and another time"):
        check_written([table], OpenFilePolicy.TRUNCATE, "restoring")
    assert check_written([table], OpenFilePolicy.REWRITE, "restoring") == []


def test_no_file_is_cut_when_one_of_them_is_bad(tmp_path: Path) -> None:
    files = [_written(tmp_path / name, 10) for name in "ab"]
    os.truncate(files[0].path, 20)
    os.truncate(files[1].path, 5)
    with pytest.raises(StorageError, match="b, which the program had open, is shorter"):
        check_written(files, OpenFilePolicy.TRUNCATE, "restoring")
    assert os.stat(files[0].path).st_size == 20
