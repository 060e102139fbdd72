"""The data of a view between memory and a file, against one byte at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.mpi.channel import SharedChannel
from remesh.mpi.upper import layouts
from remesh.mpi.upper.file_data import make_view_data
from remesh.mpi.upper.file_views import FileView
from tests.unit.mpi.file_view_cases import positions, views

_BYTES = FileView(0, 1, layouts.basic(1))


@contextlib.contextmanager
def _data_of(view: FileView, path: str | None = None, flags: int = os.O_RDWR) -> Iterator[tuple[Any, int]]:
    """The data of a view of an open file, by default an empty one, and the descriptor."""
    with tempfile.TemporaryDirectory() as folder:
        gate = SharedChannel.create(f"{folder}/channel").gate(lambda: None)
        descriptor = os.open(path or f"{folder}/file", flags | os.O_CREAT)
        try:
            yield make_view_data(gate, descriptor, view), descriptor
        finally:
            os.close(descriptor)


@given(view=views(), offset=st.integers(0, 12), num_etypes=st.integers(0, 12))
def test_what_is_written_stands_where_the_tiles_say(view: FileView, offset: int, num_etypes: int) -> None:
    start, num_bytes = offset * view.etype_bytes, num_etypes * view.etype_bytes
    written = bytes(1 + index % 255 for index in range(num_bytes))
    expected = bytearray(1000)
    for position, byte in zip(positions(view, start + num_bytes)[start:], written, strict=True):
        expected[position] = byte
    with _data_of(view) as (data, descriptor):
        assert data.write(offset, written) == num_bytes
        os.ftruncate(descriptor, len(expected))
        assert os.pread(descriptor, len(expected), 0) == expected


@given(view=views(), offset=st.integers(0, 12), num_etypes=st.integers(0, 12), file_bytes=st.integers(0, 120))
def test_what_is_read_is_what_is_there_before_the_end(
    view: FileView, offset: int, num_etypes: int, file_bytes: int
) -> None:
    start, num_bytes = offset * view.etype_bytes, num_etypes * view.etype_bytes
    whole = bytes(1 + index % 255 for index in range(file_bytes))
    places = positions(view, start + num_bytes)[start:]
    there = next((index for index, position in enumerate(places) if position >= file_bytes), num_bytes)
    into = bytearray(num_bytes)
    with _data_of(view) as (data, descriptor):
        os.pwrite(descriptor, whole, 0)
        assert data.read(offset, into) == there
    assert into[:there] == bytes(whole[position] for position in places[:there])
    assert into[there:] == bytes(num_bytes - there)


def test_what_is_not_plain_is_left_to_the_long_way_and_nothing_happens() -> None:
    numbers = array("i", [1, 2, 3])
    strided = memoryview(b"abcdef")[::2]
    with _data_of(FileView(0, 4, layouts.basic(4))) as (data, descriptor):
        for buffer in ([numbers, 3], None, 7, "text", strided, memoryview(b"abcd").cast("c"), b"12345"):
            assert data.write(0, buffer) is None
            assert data.read(0, buffer) is None
        assert data.read(0, b"1234") is None  # nobody may write to it
        assert data.write(-1, numbers) is None and data.read(-1, numbers) is None
        assert os.fstat(descriptor).st_size == 0
        assert (data.count(numbers), data.count(b"12345678"), data.count(strided), data.count([numbers])) == (
            *(3, 2),
            *(None, None),
        )
        assert data.write(2, numbers) == 12
        assert os.fstat(descriptor).st_size == 20


def test_a_view_without_data_takes_none_and_gives_none() -> None:
    with _data_of(FileView(3, 1, layouts.placed([]))) as (data, _):
        assert data.write(5, b"") == 0 and data.read(5, bytearray()) == 0
        assert data.write(0, b"x") is None and data.read(0, bytearray(1)) is None


def test_errors_of_the_system_are_told_and_the_gate_is_left(tmp_path: Path) -> None:
    channel = SharedChannel.create(str(tmp_path / "channel"))
    gate = channel.gate(lambda: None)
    for path, flags, number in (("/dev/full", os.O_WRONLY, errno.ENOSPC), ("/dev/zero", os.O_RDONLY, errno.EBADF)):
        descriptor = os.open(path, flags)
        with pytest.raises(OSError) as caught:
            make_view_data(gate, descriptor, _BYTES).write(0, b"data")
        assert caught.value.errno == number
        os.close(descriptor)
    with pytest.raises(OSError):
        make_view_data(gate, -1, _BYTES).read(0, bytearray(4))
    assert channel.num_in_files == 0


@pytest.mark.parametrize("offset", [(1 << 60) - 1, (1 << 63) - 1], ids=["position", "etypes"])
def test_a_place_that_no_file_has_is_refused(offset: int) -> None:
    eight = FileView(0, 8, layouts.basic(8))
    with _data_of(eight) as (data, _), pytest.raises((OSError, OverflowError)):
        data.write(offset, bytes(16))


def test_only_whole_numbers_are_offsets() -> None:
    with _data_of(_BYTES) as (data, _), pytest.raises(TypeError):
        data.write(1.5, b"x")
