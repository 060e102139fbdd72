"""Writer and reader of ``pages.bin``: pages in chunks, read, checksummed and written in parallel.

3 x (process memory --process_vm_readv--> buffer --[zlib] crc32, pwrite--> pages.bin)

Buffers lie in huge pages where the kernel gives them: filling a fresh buffer of small pages costs five times the copy
(2 against 10 GB/s on a virtual machine), all of it in page faults. A fresh huge page costs up to 5 ms of the processor
(a chunk takes 1 ms to be written), so buffers are kept for the next image.
"""

from __future__ import annotations

import array
import bisect
import contextlib
import errno
import fcntl
import itertools
import operator
import os
import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from remesh.carried.images.form.format import CHUNK_BYTES, ChunksState, PageChunk
from remesh.carried.images.form.layers import PageRun
from remesh.carried.images.form.ranges import PageSet
from remesh.carried.images.form.records import damaged
from remesh.foundation.checksums import compress, crc32
from remesh.foundation.linux.calls import address_of, make_buffer, read_process
from remesh.foundation.thread_pool import PooledExecutor
from remesh.foundation.threads import make_thread

_NUM_WRITERS: Final = 3
_NUM_READERS: Final = 2
_SPARE: Final[list[memoryview]] = []
"""Buffers of `CHUNK_BYTES` that no writer has at the moment, at most one for each of a writer's threads."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The memory of a process, to be read in many pieces at once."""

    pid: int
    descriptor: int  # its ``/proc/P/mem``, which is slower and also reads what the process itself may not read

    def read(self, pieces: array.array[int], room: memoryview) -> None:
        """Fill the room with the pieces, one behind the other: address and length of each, at most 1,024."""
        with contextlib.suppress(OSError):
            if read_process(self.pid, pieces, array.array("Q", [address_of(room), len(room)])) == len(room):
                return
        at, numbers = 0, iter(pieces)
        for address, num_bytes in zip(numbers, numbers, strict=True):
            end = address + num_bytes
            while address < end:
                count = os.preadv(self.descriptor, [room[at : at + end - address]], address)
                if count <= 0:
                    raise OSError(errno.EFAULT, f"saving pages: nothing could be read at {address:#x}")
                address, at = address + count, at + count


@dataclass(frozen=True, slots=True)
class _ChunkOrder:
    """A chunk that is to be written."""

    number: int  # its place among the chunks
    num_bytes: int
    fill: Callable[[memoryview], None]  # puts its bytes into the room


class PageWriter:
    """Writes pages into a file; a context manager. `ImageFolder.complete` flushes the file.

    Each of three threads takes the next chunk, copies it out of the process, compresses, sums and writes it: while the
    disk has one, the next is ready, and no thread waits for another's copy. They alternate only to choose where in
    the file their chunk goes. An error of one (a full disk) is raised by `wait_until_read` or `finish`; then, as
    when the context is left by another error, nothing more is read or written.
    """

    def __init__(self, path: Path, *, compress: bool) -> None:
        self._path = path
        self._compress = compress
        self._orders: queue.SimpleQueue[_ChunkOrder | None] = queue.SimpleQueue()
        self._num_orders = 0
        self._failure: BaseException | None = None
        self._chunks: list[PageChunk] = []
        self._save_lock = threading.Condition()
        self._next_turn = 0  # the chunk whose place in the file is to be chosen next: those before it have been read
        self._end = 0  # of the places that were given
        self._descriptor = -1
        self._is_finished = False
        self._threads: list[threading.Thread] = []
        self._rooms: list[memoryview] = []  # of the threads

    def __enter__(self) -> PageWriter:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if not self._compress:
            _go_direct(self._descriptor)
        for number in range(_NUM_WRITERS):
            self._rooms.append(_SPARE.pop() if _SPARE else make_buffer(CHUNK_BYTES))
            name = f"page-writer-{number}"
            self._threads.append(make_thread(name, self._work, self._rooms[-1], daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._failure = self._failure or error
        self._end_threads()
        os.close(self._descriptor)
        _SPARE.extend(self._rooms[: _NUM_WRITERS - len(_SPARE)])

    def save(self, memory: ProcessMemory, pages: PageSet) -> None:
        """Begin to copy pages out of a process, which is frozen until `wait_until_read` is over.

        A chunk has 512 pages, so never more pieces than the kernel takes in one call.
        """
        offsets = pages.offsets()
        for begin in range(0, offsets[-1], CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, offsets[-1])

            def read(room: memoryview, begin: int = begin, end: int = end) -> None:
                memory.read(pieces_between(pages, offsets, begin, end), room)

            self._orders.put(_ChunkOrder(self._num_orders, end - begin, read))
            self._num_orders += 1

    def wait_until_read(self) -> None:
        """Wait until nothing more is to be read from a process."""
        with self._save_lock:
            self._save_lock.wait_for(lambda: self._next_turn == self._num_orders)
        self._raise_failure()

    def finish(self) -> ChunksState:
        """Wait until everything is written; returns the index of the chunks."""
        self._end_threads()
        self._raise_failure()
        return ChunksState(tuple(self._chunks))

    def _end_threads(self) -> None:
        if not self._is_finished:
            self._is_finished = True
            for _ in self._threads:
                self._orders.put(None)
            for thread in self._threads:
                thread.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self, buffer: memoryview) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._write_chunk(order, buffer[: order.num_bytes])
            except BaseException as error:
                self._failure = self._failure or error

    def _write_chunk(self, order: _ChunkOrder, room: memoryview) -> None:
        stored, chunk = room, None
        try:
            if self._failure is None:
                order.fill(room)
                stored = memoryview(compress(room)) if self._compress else room
                chunk = PageChunk(len(room), len(stored), crc32(stored))
        finally:
            offset = self._take_turn(order.number, chunk)
        left = stored if chunk is not None else memoryview(b"")
        while left:
            count = _write_some(self._descriptor, left, offset)
            left, offset = left[count:], offset + count

    def _take_turn(self, number: int, chunk: PageChunk | None) -> int:
        """Append the chunk to the index once all before it are there; returns its offset. None takes no place."""
        with self._save_lock:
            self._save_lock.wait_for(lambda: self._next_turn == number)
            self._next_turn += 1
            offset = self._end
            if chunk is not None:
                self._chunks.append(chunk)
                self._end += chunk.num_stored_bytes
            self._save_lock.notify_all()
            return offset


def pieces_between(pages: PageSet, offsets: array.array[int], begin: int, end: int) -> array.array[int]:
    """Address and length of each piece of memory that bytes ``begin`` to ``end`` of the pages are made of.

    ``offsets`` are those of the pages; ``begin < end``, and there are as many bytes.

    >>> pages = PageSet.of([(4096, 8192), (20480, 32768)])
    >>> list(pieces_between(pages, pages.offsets(), 0, 8192))
    [4096, 4096, 20480, 4096]
    """
    first, last = bisect.bisect_right(offsets, begin) - 1, bisect.bisect_left(offsets, end)
    pieces = array.array("Q", bytes(16 * (last - first)))
    pieces[0::2] = starts = pages.starts[first:last]
    pieces[1::2] = array.array("Q", map(operator.sub, pages.ends[first:last], starts))
    before = begin - offsets[first]
    pieces[0] += before
    pieces[1] -= before
    pieces[-1] -= offsets[last] - end
    return pieces


def _go_direct(descriptor: int) -> None:
    """Bypass the page cache where the file system can, which spares most of the processor's work.

    Chunks of uncompressed pages, and their buffers, are aligned as that needs it.
    """
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)


def _leave_direct(descriptor: int, error: OSError) -> None:
    """Use the page cache after all: some file systems take O_DIRECT and then refuse it. Raise any other error."""
    if error.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        raise error
    fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)


def _write_some(descriptor: int, data: memoryview, offset: int) -> int:
    """Write as much as one call takes."""
    try:
        return os.pwrite(descriptor, data, offset)
    except OSError as error:
        _leave_direct(descriptor, error)
        return os.pwrite(descriptor, data, offset)


def check_chunks(path: Path, state: ChunksState) -> None:
    """Raise `FormatError` when the length of a pages file is not that in its index."""
    expected = state.num_stored_bytes
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        found = -1
    if found != expected:
        raise damaged("truncated", path, f"expected {expected} bytes, found {found}")


def read_chunks(path: Path, state: ChunksState, compressed: bool) -> Iterator[tuple[int, memoryview]]:
    """Read the raw bytes of each chunk with its raw offset, checked; the view is good until the next one is asked for.

    While the caller is busy with one chunk, threads read and check the next ones.
    """
    check_chunks(path, state)
    chunks = state.chunks
    largest = max((chunk.num_stored_bytes for chunk in chunks), default=1)
    rooms = [make_buffer(largest) for _ in range(_NUM_READERS + 1)]
    starts = list(itertools.accumulate((chunk.num_stored_bytes for chunk in chunks), initial=0))
    raw_offset = 0
    with open(path, "rb", buffering=0) as file, PooledExecutor(_NUM_READERS, "page-reader") as readers:
        if not compressed:
            _go_direct(file.fileno())

        def read(index: int) -> memoryview:
            chunk = chunks[index]
            stored = rooms[index % len(rooms)][: chunk.num_stored_bytes]
            if _fill(file.fileno(), stored, starts[index]) != len(stored) or crc32(stored) != chunk.crc32:
                why = f"chunk {index} does not have the checksum {chunk.crc32:#010x} of its index"
                raise damaged("bad-checksum", path, why)
            return memoryview(_inflate(stored, chunk, path)) if compressed else stored

        ahead = deque(readers.submit(read, index) for index in range(min(_NUM_READERS, len(chunks))))
        for index, chunk in enumerate(chunks):
            raw = ahead.popleft().result()
            if index + _NUM_READERS < len(chunks):
                ahead.append(readers.submit(read, index + _NUM_READERS))
            yield raw_offset, raw
            raw_offset += chunk.num_raw_bytes


def _fill(descriptor: int, room: memoryview, offset: int) -> int:
    """Read from an offset until the room is full or the file ends; returns how many bytes."""
    count = 0
    while count < len(room):
        try:
            more = os.preadv(descriptor, [room[count:]], offset + count)
        except OSError as error:
            _leave_direct(descriptor, error)
            continue
        if not more:
            break
        count += more
    return count


def _inflate(stored: memoryview, chunk: PageChunk, path: Path) -> bytes:
    try:
        inflater = zlib.decompressobj()
        raw = inflater.decompress(stored, chunk.num_raw_bytes + 1)
    except zlib.error as error:
        raise damaged("bad-checksum", path, str(error)) from error
    if len(raw) != chunk.num_raw_bytes:
        raise damaged("truncated", path, f"a chunk has {len(raw)} bytes, expected {chunk.num_raw_bytes}")
    return raw


def place_runs(
    runs: list[PageRun], chunks: Iterator[tuple[int, memoryview]], put: Callable[[int, memoryview], None]
) -> None:
    """Call ``put(address, bytes)`` for every piece of every run that the chunks hold; ``runs`` of one source."""
    ordered = sorted(runs, key=lambda run: run.raw_offset)
    first = 0
    for raw_offset, raw in chunks:
        raw_end = raw_offset + len(raw)
        while first < len(ordered) and ordered[first].raw_offset + ordered[first].num_bytes <= raw_offset:
            first += 1
        index = first
        while index < len(ordered) and ordered[index].raw_offset < raw_end:
            run = ordered[index]
            start = max(run.raw_offset, raw_offset)
            end = min(run.raw_offset + run.num_bytes, raw_end)
            put(run.start + start - run.raw_offset, raw[start - raw_offset : end - raw_offset])
            index += 1
