"""Client of stores by fsspec: memory, and every scheme that has a package for it.

Such packages do not all try again by themselves, so calls that may be repeated are.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from remesh.checkpoint.storage.remote_path import RemoteInfo, RemotePath
from remesh.checkpoint.storage.store import Entry

_PART_BYTES = 32 << 20
"""Of a large file; stores take 10,000 parts of a file."""
_WITHOUT_DIRECTORIES = frozenset({"adl", "oss", "memory"})
_CHANGING = ("size", "ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime", "created")
"""Attributes by which stores show that a file has changed."""


class FsspecClient:
    """The client of one scheme."""

    num_attempts = 5

    def __init__(self, scheme: str) -> None:
        self.has_directories = scheme not in _WITHOUT_DIRECTORIES

    def find(self, path: RemotePath) -> RemoteInfo:
        found = _call(path, "info")
        num_bytes = None if found["type"] == "directory" else int(found["size"])
        return RemoteInfo(num_bytes, tuple(str(found.get(name)) for name in _CHANGING))

    def is_directory(self, path: RemotePath) -> bool:
        return self.find(path).num_bytes is None  # not isdir, which is False at any error, too

    def entries(self, directory: RemotePath) -> list[Entry]:
        entries, itself = [], _reach(directory)[1].strip("/")
        for one in _call(directory, "ls", detail=True):
            name = one["name"].rstrip("/").rpartition("/")[2]
            if name and one["name"].strip("/") != itself:
                entries.append(Entry(name, None if one["type"] == "directory" else int(one["size"] or 0)))
        return entries

    def read(self, path: RemotePath) -> bytes:
        return bytes(_call(path, "cat_file"))

    def read_range(self, path: RemotePath, start: int, stop: int) -> list[memoryview]:
        return [memoryview(_call(path, "cat_file", start=start, end=stop))]

    def put(self, path: RemotePath, content: bytes) -> None:
        _call(path, "pipe_file", content)

    def create(self, path: RemotePath, content: bytes) -> None:
        _call(path, "pipe_file", content, mode="create")

    def upload(self, path: RemotePath) -> _FsspecUpload:
        return _FsspecUpload(_call(path, "open", "wb", block_size=_PART_BYTES))

    def copy(self, path: RemotePath, to: RemotePath) -> None:
        _call(path, "cp_file", _reach(to)[1])

    def remove(self, path: RemotePath) -> None:
        _call(path, "rm_file")

    def make_directory(self, path: RemotePath) -> None:
        _call(path, "makedirs", exist_ok=True)

    def remove_directory(self, path: RemotePath) -> None:
        _call(path, "rmdir")


class _FsspecUpload:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, content: memoryview) -> None:
        self._file.write(content)

    def finish(self) -> None:
        self._file.close()

    def abort(self) -> None:
        with suppress(Exception):  # not every client has it
            self._file.discard()
            self._file.closed = True  # else it would send the rest when it is collected
        self._file.close()


def _call(path: RemotePath, method: str, *args: Any, **options: Any) -> Any:
    files, at = _reach(path)
    return getattr(files, method)(at, *args, **options)


def _reach(path: RemotePath) -> tuple[Any, str]:
    """fsspec's file system, of which each thread has one of its own, and the path in there."""
    import fsspec  # noqa: PLC0415 - only programs that keep files elsewhere wait for its import

    files, at = fsspec.core.url_to_fs(str(path), use_listings_cache=False)
    return files, at
