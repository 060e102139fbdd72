"""How is a process written to a folder? It is frozen, its kernel state and pages are read, it goes on or is killed."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from remesh.transparent.images.kinds import ImageReport


class Frozen:
    """A process all of whose threads stand still; a context manager that thaws it.

    Only the thread that froze it may dump or thaw it. If that thread ends, the process runs on.
    """

    pid: int

    def thaw(self) -> None:
        """Let it run on exactly where it was; nothing happens if it was thawed or killed before."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.thaw()


def freeze(pid: int) -> Frozen:
    """Stop every thread of a process at whatever instruction it is; raises `ConfigError` when that is not allowed."""
    raise NotImplementedError


def dump_image(
    process: int | Frozen,
    directory: Path,
    *,
    previous: Path | None = None,
    compress: bool = False,
    track: bool = False,
) -> ImageReport:
    """Write the image of a process into a new folder, readable by its owner only, flushed to the disk.

    ``process`` is a process id (frozen for the time of the dump, then it goes on) or a process that is frozen already
    (and stays so: the way to stop is to dump, commit, and `Upper.kill` it before thawing). With ``track`` the kernel
    notes which pages change from now on, so that a later image may name this one as ``previous`` and hold only those;
    the earlier one must then be kept, beside the later one. Includes the bytes of its channel.

    Raises `NotImageable` when the process has something an image cannot hold (nothing is written then), `StorageError`
    when the disk is full or the folder exists; the process goes on in both cases.
    """
    raise NotImplementedError
