"""Memory shared by the programs of one host, in checkpoints: copied once, when all of them stand still.

    each rank     stands still ── mark ── image ───────────────────── copied? ── goes on
    first rank    stands still ── mark ── image │ all marks? ── copy ── copied   ── goes on

Files are made and removed inside the gate (:mod:`remesh.carried.mpi.channel`), which is closed while images are taken:
all ranks of a host see the same ones. Marks stand beside the copies, in the checkpoint, and whoever fails leaves one,
too. At a restart the first of those who had a file mapped makes it again, on whatever host they are now.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from remesh.carried.hosts.shared_folder import SharedFolder
from remesh.carried.images import SHARED_PATH
from remesh.carried.mpi.together import sharing_ranks
from remesh.carried.rounds.job_folder import rank_name
from remesh.foundation.errors import ConfigError, FormatError, PeerError, StorageError
from remesh.foundation.files import flush, replace_whole
from remesh.foundation.linux.proc_text import Area

FOLDER: Final = "shared"
"""Folder of a checkpoint for the files, and the marks of each host."""
_COPIED, _GIVEN_UP = "copied", "given-up"
_POLL_S: Final = 0.001
_PATIENCE_S: Final = 60.0
"""Time limit for the ranks of this host; one that is gone ends the job before that."""
_BLOCK_BYTES: Final = 4 << 20


def shared_files(areas: Iterable[Area]) -> list[str]:
    """Names of the shared files that a program has mapped."""
    return sorted({os.path.basename(area.path) for area in areas if area.path.startswith(f"{SHARED_PATH}/")})


class SharedCut:
    """One rank's part in bringing the files of its host into a checkpoint that is being taken."""

    def __init__(self, room: SharedFolder, checkpoint: Path) -> None:
        self._room = room
        self._folder = checkpoint / FOLDER
        self._marks = self._folder / f"stopped-{room.path.name}"
        self._doing = f"copying the memory that ranks of {room.path.name} share"

    @property
    def is_first(self) -> bool:
        """Whether this rank copies for all."""
        return self._room.rank == self._room.ranks()[0]

    def mark(self) -> None:
        """Note that this rank's program stands still."""
        self._marks.mkdir(parents=True, exist_ok=True)
        (self._marks / rank_name(self._room.rank)).touch()

    def give_up(self, why: str) -> None:
        """Note that this rank will not stand still, or could not copy: nobody needs to wait."""
        with contextlib.suppress(OSError):
            self._marks.mkdir(parents=True, exist_ok=True)
            replace_whole(self._marks / _GIVEN_UP, f"rank {self._room.rank}: {why}".encode())  # who sees it, reads it

    def copy(self) -> dict[str, dict[str, Any]]:
        """Wait for all ranks of the host, and copy; returns length and digest by file. The first rank calls this."""
        self._wait_for({rank_name(rank) for rank in self._room.ranks()})
        reports = {}
        for path in sorted(self._room.windows.iterdir()):
            try:
                reports[path.name] = _copy(path, self._folder / path.name)
                flush(self._folder / path.name)
            except OSError as error:
                raise StorageError(f"{self._doing}: {error}; make room and take another checkpoint") from error
        flush(self._folder)
        (self._marks / _COPIED).touch()
        return reports

    def wait(self) -> None:
        """Wait until all is copied: the program may change it after that."""
        self._wait_for({_COPIED})

    def _wait_for(self, wanted: set[str]) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while missing := wanted - (found := set(os.listdir(self._marks))):
            if _GIVEN_UP in found:
                raise PeerError(f"{self._doing}: {(self._marks / _GIVEN_UP).read_text()}")
            if time.monotonic() > deadline_s:
                raise PeerError(f"{self._doing}: no word for {_PATIENCE_S} s from {', '.join(sorted(missing))}")
            time.sleep(_POLL_S)


def begin_cut(room: SharedFolder, checkpoint: Path) -> SharedCut | None:
    """Begin the cut; None if programs of this host share nothing, which is so for all its ranks or for none."""
    return SharedCut(room, checkpoint) if any(room.windows.iterdir()) else None


def bring_back(room: SharedFolder, checkpoint: Path, ranks: Mapping[str, Mapping[str, Any]]) -> None:
    """Make again the files whose first rank is this one; ``ranks`` is of the manifest.

    Raises `FormatError` when a copy is not what it was, `StorageError` when there is no room.
    """
    known = {name: told for report in ranks.values() for name, told in report.get("shared", {}).items()}
    for name, members in sharing_ranks(ranks).items():
        if members[0] != room.rank:
            continue
        source = checkpoint / FOLDER / name
        doing = f"bringing back memory that ranks {members} share, from {source}"
        try:
            found = _copy(source, room.windows / name)
        except OSError as error:
            raise StorageError(f"{doing}: {error}; free memory, or choose another checkpoint") from error
        if found != known.get(name):
            what = f"expected {known.get(name)}, found {found}"
            raise FormatError("bad-shared", f"{doing}: {what}; choose another checkpoint")


def check_here(room: SharedFolder, ranks: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `ConfigError` when this rank is on another host than those it shares memory with. All files are back."""
    for name, members in sharing_ranks(ranks).items():
        if room.rank in members and not (room.windows / name).exists():
            raise ConfigError(
                f"restarting rank {room.rank}: ranks {', '.join(map(str, members))} share memory and must be on one "
                f"host, but rank {members[0]} is not on this one; start them so that they stay together"
            )


def _copy(source: Path, target: Path) -> dict[str, Any]:
    """Copy a file; returns length and digest. Raises `OSError`. Space is taken first: a hole would kill who maps it."""
    with source.open("rb", buffering=0) as given, open(_new_file(target), "wb", buffering=0) as made:
        os.posix_fallocate(made.fileno(), 0, os.fstat(given.fileno()).st_size)
        digest, num_bytes = hashlib.sha256(), 0
        while block := given.read(_BLOCK_BYTES):
            digest.update(block)
            num_bytes += len(block)
            left = memoryview(block)
            while left:
                left = left[made.write(left) :]
    return {"num_bytes": num_bytes, "sha256": digest.hexdigest()}


def _new_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
