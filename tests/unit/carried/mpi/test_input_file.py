"""Of a job's standard input only a file with a name is taken, from where it stands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remesh.carried.mpi.input_file import find_input
from remesh.foundation.errors import ConfigError


def test_a_file_is_taken_from_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "input").write_text("first\nsecond\n")
    with (tmp_path / "input").open("rb", buffering=0) as file:
        file.read(6)
        assert find_input(file.fileno()) == (str(tmp_path / "input"), 6)


def test_a_device_a_pipe_and_a_closed_descriptor_are_no_input() -> None:
    with open("/dev/null") as null:
        assert find_input(null.fileno()) == ("", 0)
    out, into = os.pipe()
    assert find_input(out) == ("", 0)
    os.close(into)
    os.close(out)
    assert find_input(out) == ("", 0)


def test_a_file_without_a_name_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "input").open("w+") as file:
        (tmp_path / "input").unlink()
        with pytest.raises(ConfigError, match=r"input \(deleted\), is a file without a name"):
            find_input(file.fileno())
