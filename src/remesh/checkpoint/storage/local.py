"""Files of this machine, or of a file system that is mounted on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from remesh.checkpoint.storage.interface import Entry, NewFile, RangedFile, Store


class LocalStore(Store[Path]):
    """The file system."""

    worthwhile_gap_bytes = 16 << 10
    has_directories = True

    def is_directory(self, path: Path) -> bool:
        return path.is_dir()

    def entries(self, directory: Path) -> list[Entry]:
        with os.scandir(directory) as found:
            return sorted(
                Entry(one.name, one.stat().st_size if one.is_file() else None)
                for one in found
                if one.is_file() or one.is_dir()
            )

    def size_of(self, path: Path) -> int | None:
        return path.stat().st_size if path.is_file() else None

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
        path.write_bytes(content)

    def settle(self, paths: Sequence[Path]) -> None:
        with ThreadPoolExecutor(max(1, len(paths))) as waiting:  # for the disk, which takes several at once
            list(waiting.map(_sync, paths))

    def mark(self, path: Path) -> None:
        path.touch()

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.sync_names(path.parent)

    def remove_directory(self, path: Path) -> None:
        path.rmdir()
        self.sync_names(path.parent)

    def sync_names(self, directory: Path) -> None:
        _sync(directory)

    def is_inside(self, directory: Path, path: Path) -> bool:
        return path.resolve().is_relative_to(directory.resolve())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        self._file = path.open("wb", buffering=0)

    def write(self, content: memoryview) -> None:
        while len(content):
            content = content[self._file.write(content) :]

    def sync(self) -> None:
        os.fdatasync(self._file.fileno())

    def finish(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
