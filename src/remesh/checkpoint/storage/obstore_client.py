"""Client of object stores by obstore: S3, Google Cloud Storage, Azure Blob Storage.

The parts of a file, and the ranges of a large read, go side by side. obstore tries again by itself: each request may
take a third of `STORE_TIMEOUT_S`, and no attempt begins after two thirds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from remesh.checkpoint.storage.obstore_settings import SETTINGS, open_bucket
from remesh.checkpoint.storage.remote_answers import read_timeout_s
from remesh.checkpoint.storage.remote_path import RemoteInfo, RemotePath
from remesh.checkpoint.storage.store import Entry
from remesh.foundation.errors import ConfigError
from remesh.foundation.settings import STORE_TIMEOUT_S

_PART_BYTES = 32 << 20
"""Of a large file; stores take 10,000 parts of a file."""
_NUM_PARTS = 8
"""Parts of a file on their way at once, each of which is in memory."""
_RANGE_BYTES = 8 << 20
"""Of a large read."""


class ObstoreClient:
    """The client of all buckets of one scheme."""

    has_directories = False
    num_attempts = 1
    """obstore makes more by itself."""

    def find(self, path: RemotePath) -> RemoteInfo:
        with _requests(path) as (obs, store, key):
            if not key:
                return RemoteInfo(None, ())
            head = obs.head(store, key)
            return RemoteInfo(head["size"], (head["e_tag"], head["version"], str(head["last_modified"])))

    def is_directory(self, path: RemotePath) -> bool:
        with _requests(path) as (obs, store, key):
            return not key or any(len(page) for page in obs.list(store, key))

    def entries(self, directory: RemotePath) -> list[Entry]:
        with _requests(directory) as (obs, store, key):
            found = obs.list_with_delimiter(store, key or None)
            entries = [Entry(one.rpartition("/")[2], None) for one in found["common_prefixes"]]
            for one in found["objects"]:
                if one["path"] != key:  # an empty object that other programs keep for a folder
                    entries.append(Entry(one["path"].rpartition("/")[2], one["size"]))
            if key and not entries and not found["objects"]:
                raise FileNotFoundError(2, "No such directory", str(directory))
            return entries

    def read(self, path: RemotePath) -> bytes:
        with _requests(path) as (obs, store, key):
            return bytes(obs.get(store, key).bytes())

    def read_range(self, path: RemotePath, start: int, stop: int) -> list[memoryview]:
        starts = range(start, stop, _RANGE_BYTES)
        with _requests(path) as (obs, store, key):

            async def read() -> list[memoryview]:  # get_ranges would join what lies side by side to one request
                reads = [obs.get_range_async(store, key, start=at, end=min(at + _RANGE_BYTES, stop)) for at in starts]
                return [memoryview(piece) for piece in await asyncio.gather(*reads)]

            return asyncio.run(read())

    def put(self, path: RemotePath, content: bytes) -> None:
        with _requests(path) as (obs, store, key):
            obs.put(store, key, content, use_multipart=False)

    def create(self, path: RemotePath, content: bytes) -> None:
        with _requests(path) as (obs, store, key):
            obs.put(store, key, content, mode="create", use_multipart=False)

    def upload(self, path: RemotePath) -> _ObstoreUpload:
        return _ObstoreUpload(path)

    def copy(self, path: RemotePath, to: RemotePath) -> None:
        with _requests(path) as (obs, store, key):
            obs.copy(store, key, to.rest.partition("/")[2])

    def remove(self, path: RemotePath) -> None:
        with _requests(path) as (obs, store, key):
            obs.delete(store, key)

    def make_directory(self, path: RemotePath) -> None:
        """Do nothing: a folder is there as long as a file is below it."""

    def remove_directory(self, path: RemotePath) -> None:
        """Do nothing, as above."""


class _ObstoreUpload:
    def __init__(self, path: RemotePath) -> None:
        self._path = path
        with _requests(path) as (obs, store, key):
            self._writer = obs.open_writer(store, key, buffer_size=_PART_BYTES, max_concurrency=_NUM_PARTS)

    def write(self, content: memoryview) -> None:
        with _requests(self._path):
            self._writer.write(bytes(content))  # kept until it is sent; a caller uses its memory again

    def finish(self) -> None:
        with _requests(self._path):
            self._writer.close()

    def abort(self) -> None:
        self._writer.__exit__(OSError, OSError("given up"), None)  # with an error it aborts


@contextmanager
def _requests(path: RemotePath) -> Iterator[tuple[Any, Any, str]]:
    """obstore, its store of the path's bucket, and the path in there; its errors leave as those of the interface."""
    try:
        import obstore  # noqa: PLC0415 - only programs that keep files elsewhere wait for its import
    except ImportError as missing:
        raise ConfigError(
            f"reaching {path}: the package 'obstore' is not installed, which reaches {path.scheme}://; "
            "pip install 'remesh[s3]'"
        ) from missing
    bucket, _, key = path.rest.partition("/")
    settings = tuple((name, value) for name, value in os.environ.items() if name.startswith(SETTINGS))
    if _first_process() != os.getpid():
        raise ConfigError(
            f"reaching {path}: this process was forked from one that has used a store, expected a new one, since the "
            "threads of the store's client are not here; start it with spawn, or use stores only after the fork"
        )
    try:
        yield obstore, _bucket(path.scheme, bucket, read_timeout_s(), settings), key
    except (obstore.exceptions.BaseError, OSError) as raised:
        raise _as_os_error(path, raised) from raised


def _as_os_error(path: RemotePath, raised: Exception) -> Exception:
    kind, text = type(raised).__name__, str(raised).partition("\n\nDebug source")[0]
    if kind == "AlreadyExistsError":
        return FileExistsError(17, "File exists", str(path))
    if kind in ("PermissionDeniedError", "UnauthenticatedError", "PermissionError"):
        return PermissionError(13, f"the store refused these credentials: {text}", str(path))
    if kind == "NotSupportedError" or "501 Not Implemented" in text:
        return NotImplementedError(text)
    if kind == "FileNotFoundError" or "404 Not Found" in text:
        return FileNotFoundError(2, "No such file, or no such bucket", str(path))
    if "error sending request" in text:
        text += f"; it timed out ({STORE_TIMEOUT_S.name} is for all attempts), or there is no connection"
    if "incorrectly configured region" in text:
        text += "; set AWS_REGION to that of the bucket"
    return OSError(text)


@lru_cache(maxsize=32)
def _bucket(scheme: str, bucket: str, timeout_s: float, settings: object) -> Any:
    """The store of one bucket under these settings, whose connections stay open."""
    return open_bucket(scheme, bucket, timeout_s)


@lru_cache
def _first_process() -> int:
    return os.getpid()
