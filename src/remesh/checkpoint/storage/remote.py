"""Remote storage by fsspec: object stores (s3, gs, az), memory, and every other store that has a client.

Reads, small writes and listings are tried a few times with growing pauses, unless the store has given a definite answer
(not there, not allowed). A large file goes up in parts while it is written, which the store's client tries again by
itself; what arrives is compared with what was written. No listing is cached: others write there, too.

A store may take a connection and never answer. So each call of a client is made by a thread, and waited for no longer
than `STORE_TIMEOUT_S`: a step of a save or load that goes on moves a part of a file in each call.
"""

from __future__ import annotations

import logging
import posixpath
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from remesh.checkpoint.checkpoint_errors import StoreFailedError
from remesh.checkpoint.storage.store import Entry, NewFile, RangedFile, Store
from remesh.foundation.errors import ConfigError
from remesh.foundation.settings import STORE_TIMEOUT_S
from remesh.foundation.threads import make_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")
NUM_ATTEMPTS = 5
FIRST_POLL_S = 0.2
"""Doubled after each attempt: with five, three seconds of pauses in all."""
_SILENT_S = 30.0
"""After so long without an answer a warning is logged."""
_PART_BYTES = 32 << 20
"""Of a large file; stores take 10,000 parts of a file."""
_WITHOUT_DIRECTORIES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "memory"})
_CHANGING = ("size", "ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime", "created")
"""Attributes by which stores show that a file has changed."""


class NoAnswerError(TimeoutError):
    """A store has not answered for as long as it may; another attempt would wait as long."""


_DEFINITE = (
    NoAnswerError,
    *(FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError),
    *(ValueError, TypeError, NotImplementedError, ImportError),
)
"""Errors that another attempt does not change."""


@dataclass(frozen=True, slots=True, order=True)
class RemotePath:
    """A path of a store that is not this machine's file system.

    >>> step = RemotePath("s3", "bucket/run") / "step-00000120"
    >>> str(step), step.name, str(step.parent)
    ('s3://bucket/run/step-00000120', 'step-00000120', 's3://bucket/run')
    """

    scheme: str
    """What stands before ``://``."""
    rest: str
    """What stands behind it, without a slash at its end."""

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.scheme, f"{self.rest}/{name}" if self.rest else name)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.rest}"

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.rest.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The part before the last slash; the root is its own parent."""
        return RemotePath(self.scheme, self.rest.rpartition("/")[0])


class RemoteStore(Store[RemotePath]):
    """The store of one scheme."""

    worthwhile_gap_bytes = 1 << 20

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self.has_directories = scheme not in _WITHOUT_DIRECTORIES

    def is_directory(self, path: RemotePath) -> bool:
        if _tried(f"looking at {path}", lambda: _call(path, "isdir")):
            return True
        # Many clients return False at every error; this raises where a store does not answer.
        found = self._info_of(path)
        return found is not None and found["type"] == "directory"

    def entries(self, directory: RemotePath) -> list[Entry]:
        found = _tried(f"listing {directory}", lambda: _call(directory, "ls", detail=True))
        entries = set()
        for one in found:
            name = one["name"].rstrip("/").rpartition("/")[2]
            is_itself = one["name"].strip("/") == _path_of(directory).strip("/")
            if name and not is_itself:
                entries.add(Entry(name, None if one["type"] == "directory" else int(one["size"] or 0)))
        return sorted(entries, key=lambda entry: entry.name)

    def size_of(self, path: RemotePath) -> int | None:
        found = self._info_of(path)
        return None if found is None or found["type"] == "directory" else int(found["size"])

    def version_of(self, path: RemotePath) -> tuple[object, ...] | None:
        found = self._info_of(path)
        return None if found is None else tuple(str(found.get(name)) for name in _CHANGING)

    def _info_of(self, path: RemotePath) -> Any:
        try:
            return _tried(f"looking at {path}", lambda: _call(path, "info"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, path: RemotePath) -> bytes:
        return bytes(_tried(f"reading {path}", lambda: _call(path, "cat_file")))

    def open_ranged(self, path: RemotePath) -> RangedFile:
        num_bytes = self.size_of(path)
        if num_bytes is None:
            raise FileNotFoundError(2, "No such file", str(path))
        return _RemoteRangedFile(path, num_bytes)

    def create(self, path: RemotePath) -> NewFile:
        return _RemoteNewFile(self, path)

    def put(self, path: RemotePath, content: bytes) -> None:
        def put() -> None:
            _call(path, "pipe_file", content)
            self.check_arrived(path, len(content))

        _tried(f"writing {path}", put)

    def create_once(self, path: RemotePath, content: bytes) -> bool:
        try:
            _tried(f"creating {path}", lambda: _call(path, "pipe_file", content, mode="create"))
        except FileExistsError:  # perhaps by this call, whose answer the network has lost
            with suppress(FileNotFoundError):
                return self.read(path) == content
            return False
        return True

    def rename(self, path: RemotePath, to: RemotePath) -> bool:
        try:
            _tried(f"copying {path} to {to}", lambda: _call(path, "cp_file", _path_of(to)))
        except FileNotFoundError:
            return False
        self.remove(path)
        return True

    def remove(self, path: RemotePath) -> None:
        with suppress(FileNotFoundError):
            _tried(f"removing {path}", lambda: _call(path, "rm_file"))

    def make_directory(self, path: RemotePath) -> None:
        if self.has_directories:
            _tried(f"making {path}", lambda: _call(path, "makedirs", exist_ok=True))

    def remove_directory(self, path: RemotePath) -> None:
        if self.has_directories:
            _tried(f"removing {path}", lambda: _call(path, "rmdir"))

    def sync_names(self, directory: RemotePath) -> None:
        """Do nothing: an object store has kept an object once it has answered."""

    def is_inside(self, directory: RemotePath, path: RemotePath) -> bool:
        inside, whole = (posixpath.normpath(f"/{one.rest}") for one in (directory, path))
        return path.scheme == directory.scheme and (whole == inside or whole.startswith(inside.rstrip("/") + "/"))

    def check_arrived(self, path: RemotePath, num_bytes: int) -> None:
        """Raise OSError unless the file has that length."""
        found = _call(path, "info")["size"]
        if found != num_bytes:
            raise OSError(f"the store holds {found} bytes of {path}, expected the {num_bytes} that were written")


class _RemoteRangedFile(RangedFile):
    def __init__(self, path: RemotePath, num_bytes: int) -> None:
        self._path = path
        self.num_bytes = num_bytes

    def read_into(self, start: int, destination: memoryview) -> int:
        stop = min(start + len(destination), self.num_bytes)
        if stop <= start:
            return 0

        def read() -> bytes:
            content: bytes = _call(self._path, "cat_file", start=start, end=stop)
            if len(content) != stop - start:
                raise OSError(f"the store sent {len(content)} bytes, expected {stop - start}")
            return content

        destination[: stop - start] = _tried(f"reading bytes {start} to {stop} of {self._path}", read)
        return stop - start

    def close(self) -> None:
        """Do nothing: no file is open."""


class _RemoteNewFile(NewFile):
    def __init__(self, store: RemoteStore, path: RemotePath) -> None:
        self._store = store
        self._path = path
        self._num_bytes = 0
        self._is_finished = False
        self._file: Any = _tried(f"creating {path}", lambda: _call(path, "open", "wb", block_size=_PART_BYTES))

    def write(self, content: memoryview) -> None:
        self._watched(lambda: self._file.write(content))
        self._num_bytes += len(content)

    def sync(self) -> None:
        """Do nothing: the store keeps the parts that were sent."""

    def finish(self) -> None:
        self._watched(self._file.close)
        _tried(f"writing {self._path}", lambda: self._store.check_arrived(self._path, self._num_bytes))
        self._is_finished = True

    def _watched(self, act: Callable[[], object]) -> None:
        def watched() -> None:
            try:
                _within_timeout(f"writing {self._path}", act)
            except NoAnswerError:
                self._is_finished = True  # a thread is in its client still, and would have others wait, too
                raise

        _once(f"writing {self._path}", watched)

    def close(self) -> None:
        if self._is_finished:
            return
        with suppress(Exception):  # an error is on its way already, and what is left over counts for nothing
            discard = getattr(self._file, "discard", None)
            if discard is not None:
                discard()
                self._file.closed = True  # else it would send the rest when it is collected
        with suppress(Exception):
            self._file.close()
        with suppress(Exception):
            self._store.remove(self._path)
        self._is_finished = True


def _call(path: RemotePath, method: str, *args: Any, **options: Any) -> Any:
    import fsspec  # noqa: PLC0415 - only programs that keep files elsewhere wait for its import

    files, at = fsspec.core.url_to_fs(str(path), use_listings_cache=False)  # here: each thread has clients of its own
    return _within_timeout(f"{method} of {path}", lambda: getattr(files, method)(at, *args, **options))


def _within_timeout(doing: str, act: Callable[[], T]) -> T:
    """What ``act`` returns. `NoAnswerError` when it takes too long; its thread ends with the call, or the process."""
    timeout_s, answer = _timeout_s(), Future[T]()
    silent_s = min(_SILENT_S, timeout_s / 2)

    def ask() -> None:
        try:
            answer.set_result(act())
        except BaseException as raised:  # belongs to the caller
            answer.set_exception(raised)

    try:
        make_thread("store", ask, daemon=True).start()
    except RuntimeError:  # the process is ending, and gives no more threads
        ask()
    if not wait([answer], silent_s).done:
        logger.warning("%s: no answer for %g s, waiting %g s in all", doing, silent_s, timeout_s)
        wait([answer], timeout_s - silent_s)
    if not answer.done():
        raise NoAnswerError(f"no answer for {timeout_s:g} s ({STORE_TIMEOUT_S.name})")
    return answer.result()


def _timeout_s() -> float:
    text = STORE_TIMEOUT_S.read()
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s < 1e9:
        raise ConfigError(f"reading {STORE_TIMEOUT_S.name}: found {text!r}, expected seconds; correct it, or unset it")
    return timeout_s


def _path_of(path: RemotePath) -> str:
    import fsspec  # noqa: PLC0415 - as above

    at: str = fsspec.core.url_to_fs(str(path), use_listings_cache=False)[1]
    return at


def _tried(doing: str, act: Callable[[], T]) -> T:
    """What ``act`` returns, after so many attempts as it takes, up to `NUM_ATTEMPTS`."""
    pause_s = FIRST_POLL_S
    for attempt in range(1, NUM_ATTEMPTS):
        try:
            return act()
        except _DEFINITE as raised:
            raise _as_os_error(doing, raised, attempt) from raised
        except Exception as raised:  # clients of stores have roots of their own
            logger.warning("%s failed (%r), attempt %s of %s", doing, raised, attempt, NUM_ATTEMPTS)
            time.sleep(pause_s)
            pause_s *= 2
    return _once(doing, act, NUM_ATTEMPTS)


def _once(doing: str, act: Callable[[], T], attempt: int = 1) -> T:
    try:
        return act()
    except Exception as raised:
        raise _as_os_error(doing, raised, attempt) from raised


def _as_os_error(doing: str, raised: Exception, attempt: int) -> Exception:
    """Convert an error of the client to the `OSError` that the interface promises; errors of known types stay."""
    if isinstance(raised, FileNotFoundError | NotADirectoryError | PermissionError | FileExistsError):
        return raised
    if isinstance(raised, ImportError):
        return StoreFailedError(f"{doing}: the client of this store is not installed ({raised}); install it")
    times = "once" if attempt == 1 else f"{attempt} times"
    return StoreFailedError(
        f"{doing}: tried {times}, expected an answer, found {type(raised).__name__}: {raised}; correct the URL, the "
        "network or the rights (the store's client takes credentials from the environment) and try again"
    )
