"""How pages get into a file: the chunks of one save after the other, and what an error on the way leaves undone."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from remesh.carried.images.form.format import CHUNK_BYTES
from remesh.carried.images.form.pages import PageWriter, ProcessMemory, read_chunks
from remesh.carried.images.form.ranges import PageSet
from remesh.foundation.linux.calls import address_of, make_buffer

_PAGE = 4096


class OwnMemory(ProcessMemory):
    """The memory of this very process."""

    def read(self, pieces: Any, room: memoryview) -> None:
        data = b"".join(ctypes.string_at(at, size) for at, size in zip(pieces[0::2], pieces[1::2], strict=True))
        room[:] = data


class FailingMemory(ProcessMemory):
    """Memory that cannot be read from its second chunk on."""

    def read(self, pieces: Any, room: memoryview) -> None:
        if len(room) < CHUNK_BYTES:
            raise OSError(errno.EFAULT, "gone")


@pytest.mark.parametrize("compress", [False, True])
def test_pages_stand_in_the_order_in_which_they_were_saved(tmp_path: Path, compress: bool) -> None:
    buffer = make_buffer(3 * CHUNK_BYTES)
    buffer[:] = random.Random(1).randbytes(len(buffer))
    start = address_of(buffer)
    every_third = PageSet.of((at, at + _PAGE) for at in range(start, start + len(buffer), 3 * _PAGE))
    rest = PageSet.of((at, at + 2 * _PAGE) for at in range(start + _PAGE, start + len(buffer) - _PAGE, 3 * _PAGE))
    path = tmp_path / "pages.bin"
    with PageWriter(path, compress=compress) as writer:
        for pages in (rest, every_third):
            writer.save(OwnMemory(os.getpid(), -1), pages)
        writer.wait_until_read()
        saved = bytes(buffer)
        buffer[:] = bytes(len(buffer))  # it is not looked at any more
        chunks = writer.finish()
    assert chunks.num_raw_bytes == rest.num_bytes + every_third.num_bytes
    found = b"".join(bytes(raw) for _, raw in read_chunks(path, chunks, compress))
    assert found == b"".join(saved[at - start : end - start] for part in (rest, every_third) for at, end in part)


def test_memory_that_cannot_be_read_ends_the_waiting_with_its_error(tmp_path: Path) -> None:
    pages = PageSet.of([(0, CHUNK_BYTES + _PAGE)])
    with PageWriter(tmp_path / "pages.bin", compress=False) as writer:
        writer.save(FailingMemory(os.getpid(), -1), pages)
        with pytest.raises(OSError, match="gone"):
            writer.wait_until_read()
        with pytest.raises(OSError, match="gone"):
            writer.finish()


def test_buffers_serve_one_writer_after_the_other_and_no_two_at_once(tmp_path: Path) -> None:
    def rooms(writer: PageWriter) -> set[int]:
        return {address_of(room) for room in writer._rooms}

    with PageWriter(tmp_path / "first", compress=False) as first:
        with PageWriter(tmp_path / "second", compress=False) as second:
            assert not rooms(first) & rooms(second)
        with PageWriter(tmp_path / "third", compress=False) as third:
            assert rooms(third) == rooms(second)
    with PageWriter(tmp_path / "fourth", compress=False) as fourth:
        assert rooms(fourth) == rooms(second)  # no more are kept than one writer needs
