"""Writer of an image's folder: files written and flushed in parallel, the header last."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from remesh.carried.images.form import format as image_format
from remesh.carried.images.form.format import ChunksState, Header, Seal, StoredFile
from remesh.carried.images.form.records import to_json
from remesh.foundation.errors import StorageError
from remesh.foundation.files import flush, write_new
from remesh.foundation.thread_pool import PooledExecutor

_FLUSHERS: Final = PooledExecutor(4, "flush")
"""For all images."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A completed image, on the disk."""

    num_bytes: int  # of all its files
    sha256: str  # of its header, which stands for the whole image


class ImageFolder:
    """A new folder that becomes an image; a context manager that removes it when something fails.

    While the file of pages is written, the others already go to the disk: the file system can take them in one go.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: dict[str, Future[StoredFile]] = {}

    def __enter__(self) -> Self:
        """Make it, for its owner only. Raises `StorageError`."""
        try:
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise StorageError(
                f"making an image at {self.path}: {error.strerror}; expected a new name in a folder that may be written"
            ) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        wait(self._written.values())
        if kind is not None:
            shutil.rmtree(self.path, ignore_errors=True)

    def put(self, name: str, content: Any) -> None:
        """Begin to write a file: a record as JSON, bytes as they are."""
        data = content if isinstance(content, bytes) else _json_bytes(content)
        self._written[name] = _FLUSHERS.submit(_write_file, self.path / name, data)

    def put_blocks(self, name: str, blocks: Iterator[bytes]) -> None:
        """Begin to write a file that may be large, block by block; what they are made from stays until `complete`."""
        self._written[name] = _FLUSHERS.submit(_write_blocks, self.path / name, blocks)

    def complete(self, chunks: ChunksState, header_with: Callable[[dict[str, StoredFile]], Header]) -> Completed:
        """Write the index of the chunks, whose file is there, and the header with all files that there are."""
        pages_file = self.path / image_format.PAGES_FILE
        self._written[pages_file.name] = _FLUSHERS.submit(_flush_pages, pages_file, chunks.num_stored_bytes)
        self.put(image_format.CHUNKS_FILE, chunks)
        stored = {name: future.result() for name, future in self._written.items()}
        header = header_with(stored)
        inside = _json_bytes(header)
        sealed = Seal(inside.decode(), hashlib.sha256(inside).hexdigest())
        last = _write_file(self.path / image_format.HEADER_FILE, _json_bytes(sealed))
        flush(self.path)
        return Completed(last.num_bytes + sum(file.num_bytes for file in stored.values()), last.sha256)


def _json_bytes(record: Any) -> bytes:
    return json.dumps(to_json(record), indent=None, separators=(",", ":")).encode()


def _write_file(path: Path, content: bytes) -> StoredFile:
    write_new(path, content)
    return StoredFile(len(content), hashlib.sha256(content).hexdigest())


def _write_blocks(path: Path, blocks: Iterator[bytes]) -> StoredFile:
    digest, num_bytes = hashlib.sha256(), 0
    write_new(path, b"")
    with open(path, "r+b") as file:
        for block in blocks:
            file.write(block)
            digest.update(block)
            num_bytes += len(block)
    flush(path)
    return StoredFile(num_bytes, digest.hexdigest())


def _flush_pages(path: Path, num_bytes: int) -> StoredFile:
    flush(path)
    return StoredFile(num_bytes, "")
