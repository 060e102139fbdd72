"""Contents of unnamed and in-memory files, which an image has to carry.

Bytes are kept, holes are not.

Those without a name: Fortran's ``STATUS='SCRATCH'``, ``tmpfile``, ``mkstemp`` with ``unlink``. Those in memory: what
parents and children share, POSIX semaphores and shared memory, memory files. All stand in one file of the image, one
behind the other. At restore each is made anew: on a disk under a name that it loses at once, in memory as a memory
file, or in /dev/shm under the names that it had there.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from remesh.carried.images.form.format import CARRIED_FILE
from remesh.carried.images.form.tree_format import CarriedFile
from remesh.foundation.errors import PeerError, StorageError
from remesh.foundation.linux.calls import PAGE_BYTES
from remesh.foundation.linux.proc_text import Area

MAX_BYTES: Final = 16 << 30
"""Limit of all such files on disks, without holes: the processes stand still while they are copied."""
_BLOCK_BYTES: Final = 4 << 20
_DELETED: Final = " (deleted)"
"""The text that the kernel puts behind the last name of such a file."""
_SHARED_FOLDER: Final = "/dev/shm"


def key_of(info: os.stat_result) -> tuple[str, int]:
    """Device and inode of a file, as in a memory map."""
    return f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}", info.st_ino


@dataclass(slots=True)
class CarriedSource:
    """The place where the bytes of a carried file are found while the processes that have it are frozen."""

    in_memory: bool
    link: str  # its name, or its last one, as the kernel shows it
    path: str = ""  # by which it can be opened from here; "" if no process has it open
    views: list[tuple[int, Area]] = field(default_factory=list)  # processes that have it mapped, and where

    def openable(self) -> str:
        """A path by which it can be read; "" if it can only be read out of the memory of a process."""
        if self.path:
            return self.path
        for pid, area in self.views:  # needs a right that only root has
            path = f"/proc/{pid}/map_files/{area.start:x}-{area.end:x}"
            with contextlib.suppress(OSError), open(path, "rb"):
                return path
        return ""


def describe_carried(source: CarriedSource, root: str) -> CarriedFile:
    """The record of such a file; ``root`` leads to the root folder of its processes."""
    path, runs = source.openable(), array.array("Q")
    if path:
        info = os.stat(path)
        num_bytes, mode, key = info.st_size, info.st_mode & 0o7777, key_of(info)
        runs.extend(_runs_of(path, num_bytes))
    else:
        area, mode = source.views[0][1], 0o600
        num_bytes, key = _num_mapped_bytes(source), (area.device, area.inode)
        runs.extend(_runs_in_memory(source, num_bytes))
    names = _names_of(key, root) if source.in_memory else ()
    folder = "" if source.in_memory else os.path.dirname(source.link.removesuffix(_DELETED))
    return CarriedFile(source.in_memory, names, folder, mode, num_bytes, runs.tobytes())


def _names_of(key: tuple[str, int], root: str) -> tuple[str, ...]:
    """The names of a file in /dev/shm: semaphores are mapped before they get theirs, so the kernel shows another."""
    names = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"{root}{_SHARED_FOLDER}"):
            with contextlib.suppress(OSError):
                if entry.inode() == key[1] and key_of(entry.stat(follow_symlinks=False)) == key:
                    names.append(f"{_SHARED_FOLDER}/{entry.name}")
    return tuple(sorted(names))


def _runs_of(path: str, num_bytes: int) -> Iterator[int]:
    with open(path, "rb", buffering=0) as file:
        end = 0
        while end < num_bytes:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:  # nothing but a hole is left
                break
            end = min(os.lseek(file.fileno(), start, os.SEEK_HOLE), num_bytes)
            yield from (start, end - start)


# --- out of the memory of a process ---


def _num_mapped_bytes(source: CarriedSource) -> int:
    """The number of bytes that a mapping can reach: beyond the end of the file, pages cannot be read."""
    end = max(area.offset + area.num_bytes for _, area in source.views)
    while end and not any(_page_of(source, end - PAGE_BYTES)):
        end -= PAGE_BYTES
    return end


def _page_of(source: CarriedSource, position: int) -> bytes:
    return next(iter(_read_memory(source, position, PAGE_BYTES)), b"")


def _runs_in_memory(source: CarriedSource, num_bytes: int) -> Iterator[int]:
    start = None
    for position in range(0, num_bytes + PAGE_BYTES, PAGE_BYTES):
        is_used = position < num_bytes and any(_page_of(source, position))
        if is_used and start is None:
            start = position
        elif not is_used and start is not None:
            yield from (start, position - start)
            start = None


def _read_memory(source: CarriedSource, start: int, num_bytes: int) -> Iterator[bytes]:
    end = start + num_bytes
    while start < end:
        view = next((view for view in source.views if 0 <= start - view[1].offset < view[1].num_bytes), None)
        if view is None:  # a part that no process has mapped, so none reads it
            return
        pid, area = view
        count = min(end, area.offset + area.num_bytes, start + _BLOCK_BYTES) - start
        try:
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                block = os.pread(memory.fileno(), count, area.start + start - area.offset)
        except OSError:  # behind its end
            return
        yield block
        start += len(block)


# --- the bytes ---


def read_carried(sources: Sequence[CarriedSource], files: Sequence[CarriedFile]) -> Iterator[bytes]:
    """Read the content of those files while their processes are frozen, block by block."""
    for source, record in zip(sources, files, strict=True):
        path = source.openable()
        if not path:
            for start, num_bytes in record.pieces():
                yield from _read_memory(source, start, num_bytes)
            continue
        with open(path, "rb", buffering=0) as file:
            for start, num_bytes in record.pieces():
                yield from _blocks(file, start, num_bytes, f"dumping {source.link}")


def _blocks(file: BinaryIO, start: int, num_bytes: int, doing: str) -> Iterator[bytes]:
    end = start + num_bytes
    while start < end:
        block = os.pread(file.fileno(), min(_BLOCK_BYTES, end - start), start)
        if not block:
            raise PeerError(f"{doing}: it became shorter while it was read, at byte {start} of {end}; try again")
        yield block
        start += len(block)


# --- made anew ---


def remake_carried(folder: Path, files: Sequence[CarriedFile]) -> list[int]:
    """Make the files of an image anew; descriptors of this process for them, in order, readable and writable.

    One on a disk lies in the folder of its old name, or else in TMPDIR. Raises `StorageError` when there is no room.
    """
    made: list[int] = []
    if files:
        with open(folder / CARRIED_FILE, "rb", buffering=0) as source:
            for record in files:
                made.append(_make(source, record, f"restoring {folder}"))
    return made


def _make(source: BinaryIO, record: CarriedFile, doing: str) -> int:
    start, failures = source.seek(0, os.SEEK_CUR), []
    places = [_SHARED_FOLDER if record.names else ""]
    if not record.in_memory:
        places = [record.folder, os.environ.get("TMPDIR", "/tmp")]
    for place in places:
        source.seek(start)
        try:
            return _make_at(place, source, record)
        except OSError as error:
            failures.append(f"{place or 'memory'}: {error.strerror}")
    what = "shared memory" if record.in_memory else "a file open that had no name"
    raise StorageError(
        f"{doing}: the program had {what}; its {record.num_bytes} bytes could not be stored anywhere "
        f"({'; '.join(failures)}); make room, or set TMPDIR to a folder that may be written"
    )


def _make_at(place: str, source: BinaryIO, record: CarriedFile) -> int:
    path = f"{place}/.remesh-{os.urandom(8).hex()}" if place else ""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600) if path else os.memfd_create("remesh")
    try:
        _fill(source, descriptor, record)
        os.fchmod(descriptor, record.mode)
        for name in record.names:
            # A file that has this name is only unlinked: it is of an earlier run, or of another process.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            os.link(path, name)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        if path:
            os.unlink(path)
    return descriptor


def _fill(source: BinaryIO, target: int, record: CarriedFile) -> None:
    os.truncate(target, record.num_bytes)
    for start, num_bytes in record.pieces():
        end = start + num_bytes
        while start < end:
            block = source.read(min(_BLOCK_BYTES, end - start))
            if not block:
                raise OSError(errno.EIO, "the image became shorter")
            done = 0
            while done < len(block):
                done += os.pwrite(target, block[done:], start + done)
            start += len(block)
