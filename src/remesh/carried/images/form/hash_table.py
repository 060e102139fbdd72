"""Shared table of file hashes, so that the processes of a host hash each file once.

A table is a folder in memory that those processes share. Its entries are named by the state of a file:

    <state>           the hash, once it is known
    <state>-at-once   locked by the process that computes it while processes are frozen
    <state>-ahead     locked by the process that computes it while programs run; frozen processes do not wait for it
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

_HASH_CHARACTERS: Final = 64


class Urgency(enum.Enum):
    """How a hash is found."""

    AHEAD = "ahead"  # while programs run; what another one is at is left to it
    AT_ONCE = "at-once"  # while processes are frozen; what another one is at is waited for in the end


class FileState(NamedTuple):
    """The state of a file on this machine. If it is the same, so are the bytes: the kernel sets the time of change."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, info: os.stat_result) -> Self:
        return cls(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)

    def __str__(self) -> str:
        return "-".join(map(str, self))


@dataclass(frozen=True, slots=True)
class HashTable:
    """The hashes that processes of a host have found. A folder that is gone knows nothing, and takes nothing."""

    folder: Path

    def look_up(self, state: FileState) -> str | None:
        """The hash of a file, if a process has found it."""
        with contextlib.suppress(OSError):
            found = (self.folder / f"{state}").read_text("ascii", "replace")
            return found if len(found) == _HASH_CHARACTERS else None
        return None

    def note(self, state: FileState, sha256: str) -> None:
        """Share a hash with the other processes."""
        with contextlib.suppress(OSError):
            new = self.folder / f"{state}-{os.urandom(8).hex()}"
            new.write_text(sha256, "ascii")
            new.rename(self.folder / f"{state}")

    @contextlib.contextmanager
    def turn(self, state: FileState, urgency: Urgency, *, wait: bool) -> Iterator[bool]:
        """Have the file for oneself within the block; False where another has it, unless that is waited for."""
        try:
            lock = os.open(self.folder / f"{state}-{urgency.value}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # then each process finds it for itself
            yield True
            return
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(lock)
