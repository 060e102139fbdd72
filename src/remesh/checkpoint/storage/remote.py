"""Remote storage: a `Store` over the requests of a client, each of which is waited for no longer than it may take.

A large file goes up in parts while it is written; what arrives is compared with what was written. No listing is cached:
others write there, too.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from remesh.checkpoint.storage.fsspec_client import FsspecClient
from remesh.checkpoint.storage.obstore_client import ObstoreClient
from remesh.checkpoint.storage.remote_answers import NoAnswerError, ask_store
from remesh.checkpoint.storage.remote_path import RemoteInfo, RemotePath
from remesh.checkpoint.storage.store import Entry, NewFile, RangedFile, Store

T = TypeVar("T")
_COPIED_BYTES = 5 << 30
"""Object stores copy files up to this size by themselves."""


class RemoteStore(Store[RemotePath]):
    """The store that one client reaches."""

    worthwhile_gap_bytes = 1 << 20
    worthwhile_read_bytes = 32 << 20

    def __init__(self, client: FsspecClient | ObstoreClient) -> None:
        self.client = client
        self.has_directories = client.has_directories

    def is_directory(self, path: RemotePath) -> bool:
        with suppress(FileNotFoundError, NotADirectoryError):
            return self._ask(f"looking at {path}", lambda: self.client.is_directory(path))
        return False

    def entries(self, directory: RemotePath) -> list[Entry]:
        found = self._ask(f"listing {directory}", lambda: self.client.entries(directory))
        return sorted(set(found), key=lambda entry: entry.name)

    def size_of(self, path: RemotePath) -> int | None:
        found = self._find(path)
        return None if found is None else found.num_bytes

    def version_of(self, path: RemotePath) -> tuple[object, ...] | None:
        found = self._find(path)
        return None if found is None else found.version

    def _find(self, path: RemotePath) -> RemoteInfo | None:
        try:
            return self._ask(f"looking at {path}", lambda: self.client.find(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, path: RemotePath) -> bytes:
        return self._ask(f"reading {path}", lambda: self.client.read(path))

    def open_ranged(self, path: RemotePath) -> RangedFile:
        num_bytes = self.size_of(path)
        if num_bytes is None:
            raise FileNotFoundError(2, "No such file", str(path))
        return _RemoteRangedFile(self, path, num_bytes)

    def create(self, path: RemotePath) -> NewFile:
        return _RemoteNewFile(self, path)

    def put(self, path: RemotePath, content: bytes) -> None:
        def put() -> None:
            self.client.put(path, content)
            self.check_arrived(path, len(content))

        self._ask(f"writing {path}, {len(content)} bytes", put)

    def create_once(self, path: RemotePath, content: bytes) -> bool:
        try:  # not tried again by clients, which cannot tell what another has created from what they have
            num_attempts = max(2, self.client.num_attempts)
            ask_store(f"creating {path}, {len(content)} bytes", lambda: self.client.create(path, content), num_attempts)
        except FileExistsError:  # perhaps by this call, whose answer the network has lost
            with suppress(FileNotFoundError):
                return self.read(path) == content
            return False
        except NotImplementedError:  # of two callers in one instant, both may get True
            if self.size_of(path) is not None:
                return False
            self.put(path, content)
        return True

    def rename(self, path: RemotePath, to: RemotePath) -> bool:
        num_bytes = self.size_of(path)
        if num_bytes is None:
            return False
        if num_bytes > _COPIED_BYTES:
            self._copy_through(path, to)
        else:
            try:
                self._ask(f"copying {path}, {num_bytes} bytes, to {to}", lambda: self.client.copy(path, to))
            except FileNotFoundError:
                return False
        self.remove(path)
        return True

    def _copy_through(self, path: RemotePath, to: RemotePath) -> None:
        part = memoryview(bytearray(self.worthwhile_read_bytes))
        with self.open_ranged(path) as source, self.create(to) as target:
            for start in range(0, source.num_bytes, len(part)):
                target.write(part[: source.read_into(start, part)])
            target.finish()

    def remove(self, path: RemotePath) -> None:
        with suppress(FileNotFoundError):
            self._ask(f"removing {path}", lambda: self.client.remove(path))

    def make_directory(self, path: RemotePath) -> None:
        if self.has_directories:
            self._ask(f"making {path}", lambda: self.client.make_directory(path))

    def remove_directory(self, path: RemotePath) -> None:
        if self.has_directories:
            self._ask(f"removing {path}", lambda: self.client.remove_directory(path))

    def sync_names(self, directory: RemotePath) -> None:
        """Do nothing: an object store has kept an object once it has answered."""

    def is_inside(self, directory: RemotePath, path: RemotePath) -> bool:
        inside, whole = (posixpath.normpath(f"/{one.rest}") for one in (directory, path))
        return path.scheme == directory.scheme and (whole == inside or whole.startswith(inside.rstrip("/") + "/"))

    def check_arrived(self, path: RemotePath, num_bytes: int) -> None:
        """Raise OSError unless the file has that length."""
        found = self.client.find(path).num_bytes
        if found != num_bytes:
            raise OSError(f"the store holds {found} bytes of {path}, expected the {num_bytes} that were written")

    def _ask(self, doing: str, act: Callable[[], T]) -> T:
        return ask_store(doing, act, self.client.num_attempts)


class _RemoteRangedFile(RangedFile):
    def __init__(self, store: RemoteStore, path: RemotePath, num_bytes: int) -> None:
        self._client = store.client
        self._path = path
        self.num_bytes = num_bytes

    def read_into(self, start: int, destination: memoryview) -> int:
        stop = min(start + len(destination), self.num_bytes)
        if stop <= start:
            return 0
        client = self._client

        def read() -> list[memoryview]:
            pieces = client.read_range(self._path, start, stop)
            if (found := sum(map(len, pieces))) != stop - start:
                raise OSError(f"the store sent {found} bytes, expected {stop - start}")
            return pieces

        at = 0
        # Copied here: a call that was given up does not write to memory that others use by then.
        for piece in ask_store(f"reading bytes {start} to {stop} of {self._path}", read, client.num_attempts):
            destination[at : at + len(piece)] = piece
            at += len(piece)
        return stop - start

    def close(self) -> None:
        """Do nothing: no file is open."""


class _RemoteNewFile(NewFile):
    def __init__(self, store: RemoteStore, path: RemotePath) -> None:
        self._store = store
        self._path = path
        self._num_bytes = 0
        self._is_finished = False
        self._upload = ask_store(f"creating {path}", lambda: store.client.upload(path), store.client.num_attempts)

    def write(self, content: memoryview) -> None:
        stop = self._num_bytes + len(content)
        doing = f"writing bytes {self._num_bytes} to {stop} of {self._path}"
        self._watched(doing, lambda: self._upload.write(content))
        self._num_bytes = stop

    def sync(self) -> None:
        """Do nothing: the store keeps the parts that were sent."""

    def finish(self) -> None:
        client, num_bytes = self._store.client, self._num_bytes
        self._watched(f"writing the last of {num_bytes} bytes of {self._path}", self._upload.finish)
        doing = f"looking for {self._path}, {num_bytes} bytes"
        ask_store(doing, lambda: self._store.check_arrived(self._path, num_bytes), client.num_attempts)
        self._is_finished = True

    def _watched(self, doing: str, act: Callable[[], object]) -> None:
        try:
            ask_store(doing, act)
        except OSError as raised:
            # A thread is in its client still, and would have others wait, too.
            self._is_finished = isinstance(raised.__cause__, NoAnswerError)
            raise

    def close(self) -> None:
        if self._is_finished:
            return
        with suppress(Exception):  # an error is on its way already, and what is left over counts for nothing
            ask_store(f"giving up {self._path}", self._upload.abort)
        with suppress(Exception):
            self._store.remove(self._path)
        self._is_finished = True
