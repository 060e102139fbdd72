"""Folder in memory that a lower half shares with its program, locked while its owner lives.

The owner removes it, or, where that was killed, the next rank that starts on the host.

An owner holds a lock on its folder while it lives, and the kernel releases it however the owner ends: a folder whose
lock is free has no owner. Process ids would not do: they are used again, and another container that shares the memory
counts its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import Final

_SHARED_MEMORY: Final = Path("/dev/shm")
PREFIX: Final = "remesh-rank-room-"
"""The prefix of every folder that a lock protects: one whose lock is free is removed."""
_UNLOCKED_PREFIX: Final = f".{PREFIX}"
"""The prefix of a folder that is not locked yet: its owner must not be taken for gone."""


def find_place() -> Path:
    """Find the parent of such folders: in memory if the machine offers that."""
    if _SHARED_MEMORY.is_dir():
        return _SHARED_MEMORY
    import tempfile  # noqa: PLC0415  # seldom needed, and half a megabyte with what it loads

    return Path(tempfile.gettempdir())


def make_rank_folder(place: Path | None = None) -> Path:
    """Make a new folder, locked until this process ends; in memory if there is such a place. Clears away old ones."""
    place = place or find_place()
    clear_rank_folders(place)
    made = place / f"{_UNLOCKED_PREFIX}{os.urandom(8).hex()}"
    made.mkdir(0o700)
    # Never closed, and closed by exec: no other process can hold the lock for longer than this one lives.
    fcntl.flock(os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_EX)
    return made.rename(place / made.name.removeprefix("."))


def clear_rank_folders(place: Path) -> None:
    """Remove the folders whose owners have ended."""
    for room in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, locked, or removed just now
            descriptor = os.open(room, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Others may have removed it before we had the lock, and made one of this name that is in use.
                if os.path.samestat(os.fstat(descriptor), os.stat(room)):
                    shutil.rmtree(room, ignore_errors=True)
            finally:
                os.close(descriptor)
