"""Reader of a data file that uses no byte before its block's checksum has been verified.

A file with a trailer is read in whole blocks: those that lie inside a destination go straight there, those at its
edges go through a *window*, which also serves many small neighbours with one read. A file without a trailer, of a
foreign writer, is read the same way and not checked.

Large reads are given to a few threads; reading and checking let others run meanwhile. The memory used beside the
destinations is one window for this thread and one for each reader, of at most `WINDOW_BYTES` or the longest view; of a
remote store each reader also has what one read brings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError
from remesh.checkpoint.storage import Location, store_of
from remesh.checkpoint.storage.integrity import BLOCK_BYTES, Trailer, read_checksums
from remesh.checkpoint.storage.joined_checksums import join_groups
from remesh.foundation.checksums import crc32
from remesh.foundation.thread_pool import PooledExecutor

WINDOW_BYTES = 4 << 20
_DIRECT_BYTES = 256 << 10
_TASK_BYTES = 8 << 20
_GROUP = 16
"""Blocks whose checksums are compared as one."""
NUM_READERS = min(4, os.cpu_count() or 1)
"""Threads for large reads, each of which has a window."""
_READERS: Final = PooledExecutor(NUM_READERS, "read")


class CheckedFile:
    """A data file open for reading. A context manager; leaving it waits for all reads and raises their errors."""

    def __init__(
        self,
        path: Location,
        trailer: Trailer | None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``around`` gives a context in which each large read is done."""
        self.path = path
        self._trailer = trailer
        self._block_bytes = trailer.block_bytes if trailer else BLOCK_BYTES
        self._around = around
        self._waiting: list[Future[None]] = []
        self._window = memoryview(b"")
        self._window_start = 0
        self.worthwhile_gap_bytes = store_of(path).worthwhile_gap_bytes
        """Unwanted bytes in between that are read along rather than skipped."""
        self._read_bytes = store_of(path).worthwhile_read_bytes
        self._file = store_of(path).open_ranged(path)
        self._stop = trailer.data_bytes if trailer else self._file.num_bytes
        self.num_bytes_read = 0
        """Bytes fetched from the file so far."""

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            errors = [error for waiting in self._waiting if (error := waiting.exception()) is not None]
        finally:
            self._file.close()
        if errors and raised is None:
            raise errors[0]

    @property
    def is_checked(self) -> bool:
        """Whether blocks have checksums."""
        return self._trailer is not None

    def view(self, start: int, stop: int, what: str, *, ahead: int = 0) -> memoryview:
        """The bytes ``[start, stop)``, valid until the next call; up to ``ahead`` may be read along with them."""
        if not (self._window_start <= start and stop <= self._window_start + len(self._window)):
            self._load_window(start, max(stop, min(ahead, start + WINDOW_BYTES)), stop, what)
        return self._window[start - self._window_start : stop - self._window_start]

    def read_into(self, start: int, destination: memoryview, what: str) -> None:
        """Fill ``destination``, of bytes, from ``start`` on; when leaving the file it is full, or there is an error."""
        stop = start + len(destination)
        if len(destination) < _DIRECT_BYTES or stop > self._stop:
            destination[:] = self.view(start, stop, what)
            return
        block = self._block_bytes
        body_start, body_stop = -(-start // block) * block, stop // block * block
        if body_start > start:
            destination[: body_start - start] = self.view(start, body_start, what)
        for at, end in _cut(body_start, body_stop, max(_TASK_BYTES, self._read_bytes)):
            part = destination[at - start : end - start]
            self._read_beside(partial(self._fetch, at, part, what))
        self.num_bytes_read += body_stop - body_start
        if stop > body_stop:
            destination[body_stop - start :] = self.view(body_stop, stop, what)

    def use_later(self, start: int, stop: int, what: str, use: Callable[[memoryview], None]) -> None:
        """Let a thread read the bytes ``[start, stop)`` into memory of its own and hand them to ``use``."""
        if stop > self._stop or stop - start < _DIRECT_BYTES:
            use(self.view(start, stop, what))
            return

        def act() -> None:
            window_start, window = self._blocks(start, stop, what)
            use(window[start - window_start : stop - window_start])

        block = self._block_bytes
        self.num_bytes_read += min(-(-stop // block) * block, self._stop) - start // block * block
        self._read_beside(act)

    def read_runs(self, starts: Sequence[int], num_bytes: int, destination: memoryview, what: str) -> None:
        """Fill ``destination`` with runs of so many bytes, one behind the other, and read no block that has none."""
        block, stop = self._block_bytes, self._stop
        scratch = np.empty(num_bytes + 2 * block, np.uint8).data
        at = 0
        for start in starts:
            first, last = start // block * block, min(-(-(start + num_bytes) // block) * block, stop)
            part = destination[at : at + num_bytes]
            whole = part if last - first == num_bytes else scratch[: last - first]
            self._fill_blocks(first, whole, what)
            if whole is not part:
                part[:] = whole[start - first : start - first + num_bytes]
            at += num_bytes
            self.num_bytes_read += last - first

    def _read_beside(self, act: Callable[[], None]) -> None:
        def read() -> None:
            with self._around():
                act()

        self._waiting.append(_READERS.submit(read))

    def wait(self) -> None:
        """Return when all destinations so far are full; raises the first error among their reads."""
        waiting, self._waiting = self._waiting, []
        for read in waiting:
            read.result()

    def _load_window(self, start: int, wished_stop: int, needed_stop: int, what: str) -> None:
        if needed_stop > self._stop:
            raise CheckpointFormatError(
                "truncated",
                f"reading {what}: expected bytes {start} to {needed_stop} of data file {self.path}, found that the "
                f"data ends at {self._stop}; the file is truncated, use another checkpoint",
            )
        self._window_start, self._window = self._blocks(start, wished_stop, what)
        self.num_bytes_read += len(self._window)

    def _blocks(self, start: int, stop: int, what: str) -> tuple[int, memoryview]:
        """The whole blocks around a range, and where they start."""
        block = self._block_bytes
        first, last = start // block * block, min(-(-stop // block) * block, self._stop)
        content = np.empty(last - first, np.uint8).data
        self._fetch(first, content, what)
        return first, content

    def _fetch(self, start: int, destination: memoryview, what: str) -> None:
        """Fill whole blocks; the last one of the file may be shorter."""
        piece = max(1, self._read_bytes // self._block_bytes) * self._block_bytes
        for at, end in _cut(start, start + len(destination), piece):
            self._fill_blocks(at, destination[at - start : end - start], what)

    def _fill_blocks(self, start: int, destination: memoryview, what: str) -> None:
        if (done := self._file.read_into(start, destination)) < len(destination):
            raise CheckpointFormatError(
                "truncated",
                f"reading {what}: data file {self.path} ends at byte {start + done}, expected more; it was truncated "
                "during the read, use another checkpoint",
            )
        if self._trailer is not None:
            self._check(start, destination, self._trailer, what)

    def _check(self, start: int, content: memoryview, trailer: Trailer, what: str) -> None:
        at, block = 0, trailer.block_bytes
        while at < len(content):
            number, rest = (start + at) // block, len(content) - at
            if number % _GROUP == 0 and rest >= _GROUP * block:
                size, expected = _GROUP * block, int(self._groups[number // _GROUP])
            else:
                size, expected = min(block, rest), trailer.crcs[number]
            found = crc32(content[at : at + size])
            if expected != found:
                raise CheckpointFormatError(
                    "checksum",
                    f"reading {what}: bytes {start + at} to {start + at + size} of data file {self.path} have checksum "
                    f"{found:08x}, expected {expected:08x}; the file is damaged, use another checkpoint",
                )
            at += size

    @cached_property
    def _groups(self) -> npt.NDArray[np.uint32]:
        """Checksums of groups of blocks: one call for each instead of one for each block."""
        assert self._trailer is not None
        return join_groups(np.array(self._trailer.crcs, np.uint32), _GROUP, self._block_bytes)


def verify(directory: Location) -> Iterator[tuple[str, int]]:
    """Read every file in full and compare all checksums; yields ``(file name, bytes just checked)`` on the way.

    Raises `CheckpointFormatError` at the first difference. Memory is bounded by a few MiB.
    """
    checksums = read_checksums(directory)
    checksums.check_sizes()
    for name, entry in checksums.entries.items():
        trailer = checksums.trailer_of(name)
        if trailer is None:
            checksums.check_whole(name)
            yield name, entry.num_bytes
            continue
        with CheckedFile(directory / name, trailer) as file:
            for start, stop in _cut(0, trailer.data_bytes, WINDOW_BYTES):
                yield name, len(file.view(start, stop, f"all of {directory}"))


def _cut(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Parts of a range that end at multiples of a size, so that groups of blocks lie inside them."""
    while start < stop:
        end = min(start // size * size + size, stop)
        yield start, end
        start = end
