"""How do bytes get into a data file with a checksum for each block, computed on the way?

    | blob | blob | ... | blob | one CRC-32 per block | footer |
    '------- data bytes -------'------- trailer -------------'

The data bytes are cut into *blocks* of equal length, the last one shorter. The trailer stands behind the last blob,
where readers that go by offset and length never look. Its footer tells its place, so it is found from the end.

A blob also wants the CRC-32 of its elements. For large tensors it is put together from those of the blocks.

While a large file grows, one thread computes checksums and another lets what is written reach the disk, so that little
is left to wait for at the end.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np

from remesh.checkpoint.errors import CheckpointFormatError
from remesh.checkpoint.storage import Location, RangedFile, store_of
from remesh.checkpoint.storage.joined_checksums import join_blocks
from remesh.checksums import crc32

BLOCK_BYTES = 4 << 10
"""A page: small enough that a few columns of a matrix are read without the rest; the table is 1/1024 of the data."""

_FLUSH_BYTES = 1 << 20
_WRITE_BYTES = 8 << 20
_SYNC_BYTES = 32 << 20
_MAGIC = b"remeshCK"
_FOOTER = struct.Struct("<8sIQI")
_FOOTER_CRC = struct.Struct("<I")
_END_BYTES = _FOOTER.size + _FOOTER_CRC.size


@dataclass(frozen=True, slots=True)
class Trailer:
    """Checksums of a data file."""

    block_bytes: int
    data_bytes: int
    """Length of the file without the trailer."""
    crcs: array[int]
    """CRC-32 of each block, in order."""

    @classmethod
    def of(cls, content: bytes | memoryview, block_bytes: int) -> Trailer:
        """The checksums of a file with that content."""
        view = memoryview(content)
        starts = range(0, len(view), block_bytes)
        return cls(block_bytes, len(view), array("I", [crc32(view[at : at + block_bytes]) for at in starts]))

    @property
    def num_bytes(self) -> int:
        """Length of the trailer in the file."""
        return len(self.crcs) * 4 + _END_BYTES

    def encode(self) -> bytes:
        """The trailer as it stands in the file."""
        table = self.crcs.tobytes()
        footer = _FOOTER.pack(_MAGIC, self.block_bytes, self.data_bytes, crc32(table))
        return table + footer + _FOOTER_CRC.pack(crc32(footer))


class Hasher(Protocol):
    """What computes a sum of the whole file, as `hashlib` has them."""

    def update(self, data: memoryview, /) -> None:
        """Take in more bytes."""


class DataFile:
    """A data file being written, with a block table that grows along. A context manager; `finish` makes it durable."""

    def __init__(self, path: Location, hasher: Hasher | None = None) -> None:
        self._file = store_of(path).create(path)
        self._hasher = hasher
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="remesh-hash")  # starts with its first task
        self._pending = bytearray()  # from the last block boundary on; not yet in the file
        self._flushed_bytes = 0
        self._crcs = array("I")
        self._synced_bytes = 0
        self._syncs: list[Future[None]] = []
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="remesh-sync")
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="remesh-checksum")  # starts with its first task

    def __enter__(self) -> DataFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._helper.shutdown()
        self._hashing.shutdown()
        self._syncer.shutdown()
        self._file.close()

    def tell(self) -> int:
        """Number of bytes written so far."""
        return self._flushed_bytes + len(self._pending)

    def write(self, content: bytes | memoryview) -> int:
        """Append bytes, without copying them where they are many; returns their number."""
        if len(content) >= _FLUSH_BYTES:
            self._write_through(memoryview(content))
            return len(content)
        self._pending += content
        if len(self._pending) >= _FLUSH_BYTES:
            self._flush(len(self._pending) // BLOCK_BYTES * BLOCK_BYTES)
        return len(content)

    def write_elements(self, content: memoryview, crc: int = 0) -> int:
        """Append bytes; returns their CRC-32, going on from ``crc``."""
        if len(content) < _FLUSH_BYTES:
            self.write(content)
            return crc32(content, crc)
        first = -len(self._pending) % BLOCK_BYTES
        crc = crc32(content[:first], crc)
        num_known, last = self._write_through(content)
        return crc32(content[last:], join_blocks(crc, np.array(self._crcs[num_known:], np.uint32), BLOCK_BYTES))

    def write_blob(self, head: bytes, elements: memoryview, tail: Callable[[int], bytes]) -> None:
        """Append a blob whose tail depends on the CRC-32 of its elements."""
        self.write(head)
        self.write(tail(self.write_elements(elements)))

    def align(self, num_bytes: int) -> None:
        """Fill up, so that what follows after ``num_bytes`` more begins on a boundary of blocks."""
        self.write(bytes(-(self.tell() + num_bytes) % BLOCK_BYTES))

    def _write_through(self, content: memoryview) -> tuple[int, int]:
        """Append bytes, whole blocks of them straight from where they are.

        Returns how many blocks there were up to the first of these, and how many bytes are in blocks now.
        """
        first = -len(self._pending) % BLOCK_BYTES
        self._pending += content[:first]
        self._flush(len(self._pending))
        num_known = len(self._crcs)
        last = first + (len(content) - first) // BLOCK_BYTES * BLOCK_BYTES
        for start in range(first, last, _WRITE_BYTES):
            part = content[start : min(start + _WRITE_BYTES, last)]
            added = self._helper.submit(self._add_blocks, part)  # while the operating system copies the bytes
            self._write_all(part)
            added.result()
            if self._flushed_bytes - self._synced_bytes >= _SYNC_BYTES:
                self._synced_bytes = self._flushed_bytes
                self._syncs.append(self._syncer.submit(self._file.sync))
        self._pending += content[last:]
        return num_known, last

    def flush(self) -> None:
        """Nothing: bytes go to the file when there are enough of them, and in `finish`. For writers that ask."""

    def finish(self) -> Trailer:
        """Append the trailer and let everything reach the disk."""
        data_bytes = self.tell()
        self._flush(len(self._pending))
        trailer = Trailer(BLOCK_BYTES, data_bytes, self._crcs)
        self._write_all(memoryview(trailer.encode()))
        for sync in self._syncs:  # a disk that failed says so only once, perhaps there
            sync.result()
        self._file.finish()
        return trailer

    def _flush(self, num_bytes: int) -> None:
        with memoryview(self._pending) as pending, pending[:num_bytes] as whole:
            self._add_blocks(whole)
            self._write_all(whole)
        # Not cut in place: whoever looks at this thread's stack, as a profiler does, may still hold a view of it.
        self._pending = self._pending[num_bytes:]

    def _add_blocks(self, content: memoryview) -> None:
        starts = range(0, len(content), BLOCK_BYTES)
        self._crcs.extend([crc32(content[start : start + BLOCK_BYTES]) for start in starts])

    def _write_all(self, content: memoryview) -> None:
        self._flushed_bytes += len(content)
        if self._hasher is None:
            self._file.write(content)
            return
        hashed = self._hashing.submit(self._hasher.update, content)  # while the operating system copies the bytes
        self._file.write(content)
        hashed.result()


def read_trailer_bytes(path: Location) -> bytes:
    """The trailer of a data file as it stands there; `CheckpointFormatError` when there is none."""
    with store_of(path).open_ranged(path) as file:
        size = file.num_bytes
        end = _read(file, max(0, size - _END_BYTES), min(size, _END_BYTES))
        if len(end) < _END_BYTES or not end.startswith(_MAGIC):
            raise _no_trailer(path, f"{size} bytes that do not end in one")
        _, block_bytes, data_bytes, _ = _FOOTER.unpack_from(end)
        table_bytes = -(-data_bytes // block_bytes) * 4 if block_bytes else -1
        if data_bytes + table_bytes + _END_BYTES != size:
            raise _no_trailer(path, f"{size} bytes, with a footer of {data_bytes} bytes in blocks of {block_bytes}")
        return _read(file, data_bytes, table_bytes) + end


def _read(file: RangedFile, start: int, num_bytes: int) -> bytes:
    content = bytearray(num_bytes)
    return bytes(content[: file.read_into(start, memoryview(content))])


def decode_trailer(content: bytes) -> Trailer:
    """The trailer in bytes that `read_trailer_bytes` returned and a checksum has confirmed."""
    _, block_bytes, data_bytes, _ = _FOOTER.unpack_from(content, len(content) - _END_BYTES)
    crcs = array("I")
    crcs.frombytes(content[: len(content) - _END_BYTES])
    return Trailer(block_bytes, data_bytes, crcs)


def _no_trailer(path: Location, found: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        "truncated",
        f"reading the checksums of data file {path}: expected them at its end, found {found}; the file is truncated or "
        "damaged, use another checkpoint",
    )
