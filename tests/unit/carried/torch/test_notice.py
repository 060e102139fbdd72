"""Notices to a program, in place."""

from __future__ import annotations

from pathlib import Path

import pytest

from remesh.carried.torch.notice import Notice, read_notice, write_notice
from remesh.foundation.errors import FormatError


def _notice(number: int) -> Notice:
    return Notice(number, ("127.0.0.1", 4000), ("127.0.0.1", 4001), "00ff", "remesh/round-1/", "lo", (2,))


def test_a_notice_comes_back_as_it_was_written_and_only_once(tmp_path: Path) -> None:
    write_notice(tmp_path / "channel", _notice(3))
    assert read_notice(tmp_path / "channel", 2) == _notice(3)
    assert read_notice(tmp_path / "channel", 3) is None


def test_an_empty_file_has_no_notice(tmp_path: Path) -> None:
    (tmp_path / "channel").touch()
    assert read_notice(tmp_path / "channel", 0) is None


def test_the_file_stays_the_same_file(tmp_path: Path) -> None:
    write_notice(tmp_path / "channel", _notice(1))
    before = (tmp_path / "channel").stat().st_ino
    write_notice(tmp_path / "channel", _notice(2))
    assert (tmp_path / "channel").stat().st_ino == before


def test_what_is_no_notice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "channel").write_bytes((1).to_bytes(8, "little") + (2).to_bytes(8, "little") + b"{}")
    with pytest.raises(FormatError, match="bad-notice|another version"):
        read_notice(tmp_path / "channel", 0)
