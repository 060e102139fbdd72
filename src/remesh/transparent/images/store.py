"""How does an image become complete? Records and channel are written beside the pages, the header last, all flushed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from remesh.errors import StorageError
from remesh.transparent.images import format as image_format
from remesh.transparent.images.format import Ancestor, Header, Machine, PagesState, Seal, StoredFile
from remesh.transparent.images.records import to_json

_NUM_FLUSHERS: Final = 4


@dataclass(frozen=True, slots=True)
class Contents:
    """What goes into an image whose pages are written."""

    pid: int  # inner id of the process
    compressed: bool  # the pages
    builds_upon: tuple[Ancestor, ...]
    machine: Machine
    records: Mapping[str, Any]  # by name: all of RECORD_FILES
    channel: bytes | None


def make_folder(directory: Path) -> None:
    """A new folder for an image, for its owner only. Raises `StorageError`."""
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise StorageError(
            f"making an image at {directory}: {error.strerror}; expected a new name in a folder that may be written"
        ) from error


def complete_image(directory: Path, contents: Contents) -> int:
    """Write everything but the pages, flush all; the length of all files of the image, pages included.

    Files are flushed side by side, so that the file system can take them in one go.
    """
    pages: PagesState = contents.records[image_format.PAGES_INDEX_FILE]
    stored = {image_format.PAGES_FILE: StoredFile(sum(chunk.num_stored_bytes for chunk in pages.chunks), "")}
    with ThreadPoolExecutor(_NUM_FLUSHERS, "remesh-flush") as pool:
        flushed = pool.submit(flush, directory / image_format.PAGES_FILE)
        written = {
            name: pool.submit(_write_file, directory / name, _json_bytes(record))
            for name, record in contents.records.items()
        }
        if contents.channel is not None:
            name = image_format.CHANNEL_FILE
            written[name] = pool.submit(_write_file, directory / name, contents.channel)
        flushed.result()
        stored.update((name, future.result()) for name, future in written.items())
    header = Header(
        version=image_format.VERSION,
        pid=contents.pid,
        compressed=contents.compressed,
        builds_upon=contents.builds_upon,
        machine=contents.machine,
        files=stored,
    )
    inside = _json_bytes(header)
    sealed = Seal(inside.decode(), hashlib.sha256(inside).hexdigest())
    last = _write_file(directory / image_format.HEADER_FILE, _json_bytes(sealed))
    flush(directory)
    return last.num_bytes + sum(file.num_bytes for file in stored.values())


def _json_bytes(record: Any) -> bytes:
    return json.dumps(to_json(record), indent=None, separators=(",", ":")).encode()


def _write_file(path: Path, content: bytes) -> StoredFile:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]
        os.fsync(descriptor)
    return StoredFile(len(content), hashlib.sha256(content).hexdigest())


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk: a rename is there after a crash, too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
