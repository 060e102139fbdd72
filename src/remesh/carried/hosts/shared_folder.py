"""Folder in memory that the ranks of a job share on one host.

    ranks/rank-0003    who is here: each rank of the run on this host, from its start
    windows/           files that programs map: each finds them under one name (`SHARED_PATH`)

Each rank holds a lock on the folder, shared with the others, while it lives. The last rank to release it removes it;
what killed ranks leave is removed by the next that start on the host, as their own folders are
(:mod:`remesh.carried.hosts.rank_folder`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from remesh.carried.hosts.rank_folder import PREFIX, clear_rank_folders, find_place
from remesh.carried.rounds.job_folder import rank_name
from remesh.foundation.errors import StorageError
from remesh.wire.token import Token


@dataclass(slots=True)
class SharedFolder:
    """The folder of a run on this host, as one rank has it."""

    path: Path
    rank: int
    _lock: int

    @classmethod
    def enter(cls, run: str, rank: int, place: Path | None = None) -> Self:
        """Enter the folder of a run, which the first rank makes; ``run`` is known to its ranks alone.

        Raises `StorageError` where it cannot be made, or is another user's.
        """
        path = host_folder(run, place)
        try:
            room = cls(path, rank, _join(path))
            for folder in (room.windows, room._ranks):
                folder.mkdir(mode=0o700, exist_ok=True)
            (room._ranks / rank_name(rank)).touch()
        except OSError as error:
            raise StorageError(
                f"making {path} for the ranks of this host: {error}; check its free space and permissions"
            ) from error
        return room

    @property
    def windows(self) -> Path:
        """The folder of the files that programs map."""
        return self.path / "windows"

    @property
    def _ranks(self) -> Path:
        return self.path / "ranks"

    def ranks(self) -> list[int]:
        """The ranks of this host, once all of them have come."""
        return sorted(int(entry.name.removeprefix(rank_name(0)[:-4])) for entry in self._ranks.iterdir())

    def leave(self) -> None:
        """Release the folder; the last rank removes it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            clear_rank_folders(self.path.parent)


def host_folder(run: str, place: Path | None = None) -> Path:
    """The path of a run's folder on this host."""
    digest = hashlib.sha256(f"{run}\n{socket.gethostname()}".encode()).hexdigest()
    return (place or find_place()) / f"{PREFIX}of-host-{digest[:16]}"


def name_run(token: Token, coordinator: str) -> str:
    """Name a run by a digest that only its ranks know; ``coordinator`` is the address that they were given."""
    return token.sign("host", coordinator.encode()).hex()


def _join(path: Path) -> int:
    """Lock the folder of this name; if another rank removes it meanwhile as a dead one's, it is made again."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH)
                owner = os.fstat(lock)
                if owner.st_uid != os.geteuid():
                    raise PermissionError(f"it belongs to user {owner.st_uid}")
                if os.path.samestat(owner, os.stat(path)):
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
