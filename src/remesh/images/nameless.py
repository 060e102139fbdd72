"""How are files without a name carried, which were deleted while they are open or never had one? Bytes and all.

Fortran's ``STATUS='SCRATCH'``, ``tmpfile`` and ``mkstemp`` with ``unlink`` make such files. Their bytes stand in one
file of the image, one behind the other, without holes. At restore each is made anew and loses its name once it is open.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from remesh.errors import PeerError, StorageError
from remesh.images.format import NAMELESS_FILE, FilesState, NamelessFile

MAX_BYTES: Final = 16 << 30
"""Of all such files of a process, without holes: the process stands still while they are copied."""
_BLOCK_BYTES: Final = 4 << 20
_DELETED: Final = " (deleted)"
"""What the kernel puts behind the last name of such a file."""


def describe_nameless(path: str, link: str) -> NamelessFile:
    """The record of such a file, which is read by ``path``; ``link`` is its last name as the kernel tells it."""
    runs = array.array("Q")
    with open(path, "rb", buffering=0) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        end = 0
        while end < num_bytes:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:  # nothing but a hole is left
                break
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            runs.extend((start, end - start))
    return NamelessFile(os.path.dirname(link.removesuffix(_DELETED)), num_bytes, runs.tobytes())


def read_nameless(pid: int, files: FilesState) -> Iterator[bytes]:
    """What is in those files of a process that stands still, block by block."""
    for at, record in enumerate(files.nameless):
        number = next(file.number for file in files.files if file.nameless == at)
        with open(f"/proc/{pid}/fd/{number}", "rb", buffering=0) as file:
            for start, num_bytes in record.pieces():
                yield from _blocks(file, start, num_bytes, f"dumping process {pid}: descriptor {number}")


def copy_nameless(folder: Path, files: FilesState) -> Iterator[bytes]:
    """The same, out of an image."""
    path = folder / NAMELESS_FILE
    with open(path, "rb", buffering=0) as file:
        yield from _blocks(file, 0, sum(record.num_stored_bytes for record in files.nameless), f"reading {path}")


def _blocks(file: BinaryIO, start: int, num_bytes: int, doing: str) -> Iterator[bytes]:
    end = start + num_bytes
    while start < end:
        block = os.pread(file.fileno(), min(_BLOCK_BYTES, end - start), start)
        if not block:
            raise PeerError(f"{doing}: it became shorter while it was read, at byte {start} of {end}; try again")
        yield block
        start += len(block)


@contextlib.contextmanager
def remade(folder: Path, files: FilesState) -> Iterator[list[str]]:
    """Make the files of an image anew; their paths, in order. Nothing stands there any more when the context is left.

    Each lies in the folder of its old name, or else in TMPDIR. Raises `StorageError` when there is no room.
    """
    made: list[str] = []
    try:
        if files.nameless:
            with open(folder / NAMELESS_FILE, "rb", buffering=0) as source:
                for record in files.nameless:
                    made.append(_make(source, record, f"restoring {folder}"))
        yield made
    finally:
        for path in made:
            os.unlink(path)


def _make(source: BinaryIO, record: NamelessFile, doing: str) -> str:
    start, failures = source.seek(0, os.SEEK_CUR), []
    for place in (record.folder, os.environ.get("TMPDIR", "/tmp")):
        path = f"{place}/.remesh-{os.urandom(8).hex()}"
        source.seek(start)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as target:
                _fill(source, target, record)
        except OSError as error:
            failures.append(f"{place}: {error.strerror}")
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)
            continue
        return path
    raise StorageError(
        f"{doing}: the program had a file of {record.num_bytes} bytes open that had no name; it could not be made "
        f"again ({'; '.join(failures)}); make room, or set TMPDIR to a folder that may be written"
    )


def _fill(source: BinaryIO, target: BinaryIO, record: NamelessFile) -> None:
    os.truncate(target.fileno(), record.num_bytes)
    for start, num_bytes in record.pieces():
        target.seek(start)
        left = num_bytes
        while left:
            block = source.read(min(_BLOCK_BYTES, left))
            if not block:
                raise OSError(errno.EIO, "the image became shorter")
            target.write(block)
            left -= len(block)
