"""Interface of a client of remote stores: one method for each request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from remesh.checkpoint.storage.store import Entry


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


@dataclass(frozen=True, slots=True)
class RemoteInfo:
    """What a store tells of a path."""

    num_bytes: int | None
    """Length of the file; None for a directory."""
    version: tuple[object, ...]
    """Another one when the file has been replaced."""


class Upload(ABC):
    """A large file that goes up in parts."""

    @abstractmethod
    def write(self, content: memoryview) -> None:
        """Append all of it."""

    @abstractmethod
    def finish(self) -> None:
        """Return when the store has all parts and shows the file."""

    @abstractmethod
    def abort(self) -> None:
        """Give the file up, with its parts."""


class RemoteClient(ABC):
    """A client that makes the requests; each method may be called by any thread.

    A path that is not there is a `FileNotFoundError`, a missing right a `PermissionError`.
    """

    has_directories: bool
    """Whether a directory exists on its own."""
    num_attempts = 1
    """Attempts that a caller makes for one answer; one where the client tries again by itself."""

    @abstractmethod
    def find(self, path: RemotePath) -> RemoteInfo:
        """What is at a path."""

    @abstractmethod
    def is_directory(self, path: RemotePath) -> bool:
        """Whether there is a directory, or something below that path."""

    @abstractmethod
    def entries(self, directory: RemotePath) -> list[Entry]:
        """The files and folders directly in a directory, in any order."""

    @abstractmethod
    def read(self, path: RemotePath) -> bytes:
        """All of a file."""

    @abstractmethod
    def read_range(self, path: RemotePath, start: int, stop: int) -> list[memoryview]:
        """The bytes of a range that lies in the file, in pieces."""

    @abstractmethod
    def put(self, path: RemotePath, content: bytes) -> None:
        """Make ``path`` hold ``content``, in one step."""

    @abstractmethod
    def create(self, path: RemotePath, content: bytes) -> None:
        """`put`, or `FileExistsError` where there is a file; `NotImplementedError` of a store that does not have it."""

    @abstractmethod
    def upload(self, path: RemotePath) -> Upload:
        """Start a file that goes up in parts."""

    @abstractmethod
    def copy(self, path: RemotePath, to: RemotePath) -> None:
        """Copy a file within the store."""

    @abstractmethod
    def remove(self, path: RemotePath) -> None:
        """Remove a file."""

    @abstractmethod
    def make_directory(self, path: RemotePath) -> None:
        """Make a directory and those above it, where they exist on their own."""

    @abstractmethod
    def remove_directory(self, path: RemotePath) -> None:
        """Remove an empty directory, where they exist on their own."""
