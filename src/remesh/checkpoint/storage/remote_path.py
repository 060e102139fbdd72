"""Path of a remote file, and what its store tells of it."""

from __future__ import annotations

from dataclasses import dataclass


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
