"""Storage interface of checkpoints, and the local file system as its first implementation.

A store keeps files under paths. A file is written once, from start to end, and then read in ranges. Two promises carry
the commit of a save:

- ``put``: a small file appears in full or not at all, and is durable when the call returns;
- ``create`` ... ``finish``: a large file is durable and in full when ``finish`` returns; before that, nothing is said.
  Several small ones are ``write_soon`` ... ``settle``, which wait for a disk once.

A local file system keeps the first by a rename, an object store because it shows an object when all of it has arrived.
Neither has to rename a directory, so the same commit serves both: the marker file of a checkpoint is put last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Self, TypeVar

from remesh.foundation.files import flush

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""What file systems without hard links answer."""
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
P = TypeVar("P")
"""How a store names its files: a `Path`, or a `RemotePath`."""


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One name in a directory."""

    name: str
    num_bytes: int | None
    """Length of the file; None for a directory."""

    @property
    def is_file(self) -> bool:
        """Whether it is a file."""
        return self.num_bytes is not None


class _ClosedAtEnd(ABC):
    """A context manager that closes itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Let go of the file; gives up one that is being written and not finished."""


class RangedFile(_ClosedAtEnd):
    """A file open for reading at any place, by any thread. A context manager."""

    num_bytes: int
    """Length of the file when it was opened."""

    @abstractmethod
    def read_into(self, start: int, destination: memoryview) -> int:
        """Fill ``destination`` from ``start`` on; returns the number of bytes, fewer only where the file ends."""


class NewFile(_ClosedAtEnd):
    """A file being written. A context manager; left without `finish`, the file is not to be relied on."""

    @abstractmethod
    def write(self, content: memoryview) -> None:
        """Append all of it."""

    @abstractmethod
    def sync(self) -> None:
        """Let what is written so far reach the disk, where that means something; another thread may call it."""

    @abstractmethod
    def finish(self) -> None:
        """Return when the file is durable and in full."""


class Store(ABC, Generic[P]):
    """A place that keeps files. Methods raise OSError, and FileNotFoundError where a path is not there."""

    worthwhile_gap_bytes: int
    """Up to so many unwanted bytes between two wanted ranges it is cheaper to read along than to ask twice."""
    worthwhile_read_bytes: int
    """Up to so many bytes one read is cheaper than several."""
    has_directories: bool
    """Whether a directory exists on its own; where not, it is there as long as a file is below it."""

    @abstractmethod
    def is_directory(self, path: P) -> bool:
        """Whether there is a directory, or something below that path."""

    @abstractmethod
    def entries(self, directory: P) -> list[Entry]:
        """The files and folders directly in a directory."""

    @abstractmethod
    def size_of(self, path: P) -> int | None:
        """Length of a file; None when there is no such file."""

    @abstractmethod
    def version_of(self, path: P) -> tuple[object, ...] | None:
        """A value that is another one when the file has been replaced; None when there is no such file."""

    @abstractmethod
    def read(self, path: P) -> bytes:
        """All of a file."""

    @abstractmethod
    def open_ranged(self, path: P) -> RangedFile:
        """Open a file for reading at any place."""

    @abstractmethod
    def create(self, path: P) -> NewFile:
        """Start a file; one of that name is replaced."""

    @abstractmethod
    def put(self, path: P, content: bytes) -> None:
        """Make ``path`` hold ``content`` in one step that survives a crash."""

    def write(self, path: P, content: bytes | memoryview) -> None:
        """Make ``path`` hold ``content`` durably; a crash in between may leave a part of it, or no name."""
        with self.create(path) as file:
            file.write(memoryview(content))
            file.finish()

    def write_soon(self, path: P, content: bytes | memoryview) -> None:
        """`write`, but durable only after `settle` of it too."""
        self.write(path, content)

    def settle(self, paths: Sequence[P]) -> None:
        """Return when files are durable that `write_soon` has written; they reach the disk together."""

    @abstractmethod
    def create_once(self, path: P, content: bytes) -> bool:
        """Let a small file appear in full, unless there is one; whether this content is there by this call.

        Of all callers for one path, in any process of any machine, one gets True. It promises nothing for crashes.
        """

    @abstractmethod
    def rename(self, path: P, to: P) -> bool:
        """Give a durable file another name, in the place of one that has it; whether there was one, else do nothing."""

    @abstractmethod
    def remove(self, path: P) -> None:
        """Remove a file; nothing happens when it is not there."""

    @abstractmethod
    def make_directory(self, path: P) -> None:
        """Make a directory and those above it, where directories exist on their own."""

    @abstractmethod
    def remove_directory(self, path: P) -> None:
        """Remove an empty directory, where directories exist on their own; of a link to any, the link."""

    @abstractmethod
    def sync_names(self, directory: P) -> None:
        """Let the names in a directory reach the disk; without it a name may be lost in a crash."""

    def is_link(self, path: P) -> bool:
        """Whether a path is a symbolic link, which may be removed, while what it leads to is not ours."""
        return False

    @abstractmethod
    def is_inside(self, directory: P, path: P) -> bool:
        """Whether a path, after following links, lies in a directory or below it.

        Files of a snapshot in Hugging Face's cache are links to the blobs beside all snapshots: these count as inside.
        """


class LocalStore(Store[Path]):
    """The file system of this machine, or one that is mounted on it."""

    worthwhile_gap_bytes = 16 << 10
    worthwhile_read_bytes = 256 << 10  # checked while it is still in the processor's cache
    has_directories = True

    def is_directory(self, path: Path) -> bool:
        found = _stat(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def entries(self, directory: Path) -> list[Entry]:
        with os.scandir(directory) as found:
            return sorted(entry for one in found if (entry := _entry_of(one)) is not None)

    def size_of(self, path: Path) -> int | None:
        found = _stat(path)
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None

    def version_of(self, path: Path) -> tuple[object, ...] | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return (str(path.resolve()), found.st_ino, found.st_size, found.st_mtime_ns)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def open_ranged(self, path: Path) -> RangedFile:
        return _LocalRangedFile(path)

    def create(self, path: Path) -> NewFile:
        return _LocalNewFile(path)

    def put(self, path: Path, content: bytes) -> None:
        if not content:  # an empty file is there in full as soon as its name is
            path.touch()
        else:
            temporary = path.with_name(path.name + ".tmp")
            with _LocalNewFile(temporary) as file:
                file.write(memoryview(content))
                file.finish()
            temporary.replace(path)
        self.sync_names(path.parent)

    def write_soon(self, path: Path, content: bytes | memoryview) -> None:
        with _LocalNewFile(path) as file:
            file.write(memoryview(content))

    def settle(self, paths: Sequence[Path]) -> None:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("rb", buffering=0)) for path in paths]
            for file in files:  # the system begins to write all of them, since it is to forget what it has of them
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for file in files:
                os.fsync(file.fileno())

    def create_once(self, path: Path, content: bytes) -> bool:
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        temporary.write_bytes(content)
        try:
            os.link(temporary, path)
        except FileExistsError:  # perhaps by this call, whose answer a file server has lost
            with contextlib.suppress(FileNotFoundError):
                return path.read_bytes() == content
            return False
        except (
            FileNotFoundError
        ):  # a save that has come to its end sweeps such files away; without a folder this raises
            return self.create_once(path, content)
        except OSError as raised:
            if raised.errno not in _NO_LINKS:
                raise
            return _create_in_parts(path, content)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def rename(self, path: Path, to: Path) -> bool:
        try:
            path.replace(to)
        except FileNotFoundError:
            return False
        return True

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.sync_names(path.parent)

    def remove_directory(self, path: Path) -> None:
        if path.is_symlink():
            path.unlink()
        else:
            path.rmdir()
        self.sync_names(path.parent)

    def sync_names(self, directory: Path) -> None:
        flush(directory)

    def is_link(self, path: Path) -> bool:
        return path.is_symlink()

    def is_inside(self, directory: Path, path: Path) -> bool:
        home, found = directory.resolve(), path.resolve()
        blobs = [folder.parent / "blobs" for folder in home.parents if folder.name == "snapshots"]
        return found.is_relative_to(home) or found.parent in blobs


def _stat(path: Path) -> os.stat_result | None:
    """None where nothing is there. From Python 3.14 on, ``Path.exists`` and its like return False at any error."""
    try:
        return path.stat()
    except OSError as raised:
        if raised.errno in _NOTHING_THERE:
            return None
        raise
    except ValueError:  # no file system has such a name
        return None


def _entry_of(found: os.DirEntry[str]) -> Entry | None:
    """None for what is neither file nor directory, and for what was removed since the directory was read."""
    if found.is_dir():
        return Entry(found.name, None)
    with contextlib.suppress(FileNotFoundError):
        if found.is_file():
            return Entry(found.name, found.stat().st_size)
    return None


def _create_in_parts(path: Path, content: bytes) -> bool:
    """`Store.create_once` where a file has one name only: others may see it empty for a moment."""
    try:
        with path.open("xb", buffering=0) as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


class _LocalRangedFile(RangedFile):
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        self.num_bytes = os.fstat(self._descriptor).st_size

    def read_into(self, start: int, destination: memoryview) -> int:
        done = count = os.preadv(self._descriptor, (destination,), start)
        while count and done < len(destination):
            count = os.preadv(self._descriptor, (destination[done:],), start + done)
            done += count
        return done

    def close(self) -> None:
        os.close(self._descriptor)


class _LocalNewFile(NewFile):
    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("xb", buffering=0)
        except (
            FileExistsError
        ):  # perhaps a link, or a second name of a file in another checkpoint: never written through
            path.unlink()
            self._file = path.open("xb", buffering=0)

    def write(self, content: memoryview) -> None:
        while len(content):
            content = content[self._file.write(content) :]

    def sync(self) -> None:
        os.fdatasync(self._file.fileno())

    def finish(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
