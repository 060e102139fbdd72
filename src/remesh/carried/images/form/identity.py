"""Identity of a file at restore, on this machine or another: length, time, and a hash of its bytes.

Of a file that is longer than `WHOLE_BYTES`, samples are hashed: processes stand still meanwhile, and data sets and
results have any length. Its beginning and its end are among them, and blocks in between at equal distances.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from remesh.carried.images.form.format import FileIdentity
from remesh.carried.images.form.hash_table import FileState, HashTable, Urgency
from remesh.foundation.files import flush
from remesh.foundation.linux.calls import is_in_memory

WHOLE_BYTES: Final = 64 << 20
"""Length of the longest files of which all bytes are hashed."""
_BLOCK_BYTES: Final = 4 << 20
_EDGE_BYTES: Final = 1 << 20
"""The sample at either end of a long file, with what was appended last."""
_NUM_SAMPLES: Final = 256
_SAMPLE_BYTES: Final = 64 << 10
_SETTLED_NS: Final = 2_000_000_000
"""A file that was changed less than this ago may change again without another time: clocks of files have ticks."""


class Identities:
    """A cache of the identities of files, with the hashes of files that have not changed since.

    Shared libraries are hashed once for all images of a process; and, with a table, for all processes of a host.
    """

    def __init__(self) -> None:
        self._known: dict[FileState, str] = {}
        self._flushed: dict[FileState, str] = {}  # the same of files that are mapped for writing
        self._table: HashTable | None = None

    def share(self, table: HashTable) -> None:
        """Share hashes with the other processes that have this table, from now on."""
        self._table = table

    def of(self, path: str) -> FileIdentity:
        """Compute the identity of a file."""
        state = FileState.of(os.stat(path))
        return FileIdentity(state.num_bytes, state.mtime_ns, self._look_up(state) or self._hash(path, state))

    def gather(self, paths: Iterable[str], urgency: Urgency) -> None:
        """Hash files of which nothing is known, those first that no other process hashes; unreadable ones are left out.

        With `Urgency.AHEAD` what another process is at is left to it.
        """
        unknown: dict[FileState, str] = {}
        for path in paths:
            with contextlib.suppress(OSError):
                state = FileState.of(os.stat(path))
                if not self._look_up(state):
                    unknown.setdefault(state, path)
        left = sorted(unknown, key=lambda state: state.num_bytes, reverse=True)
        for wait in (False,) if urgency is Urgency.AHEAD else (False, True):
            left = [state for state in left if not self._gather_one(unknown[state], state, urgency, wait=wait)]

    def _gather_one(self, path: str, state: FileState, urgency: Urgency, *, wait: bool) -> bool:
        """Whether nothing is left to do for a file."""
        with contextlib.suppress(OSError):  # the others are looked up although one file is gone
            if self._table is None or not _is_settled(state):
                self._hash(path, state)
                return True
            with self._table.turn(state, urgency, wait=wait) as is_ours:
                if not is_ours:
                    return False
                if not self._look_up(state):
                    self._hash(path, state)
                    if state in self._known:
                        self._table.note(state, self._known[state])
        return True

    def _look_up(self, state: FileState) -> str | None:
        found = self._known.get(state)
        if found is None and self._table is not None and (found := self._table.look_up(state)):
            self._known[state] = found
        return found

    def _hash(self, path: str, state: FileState) -> str:
        """Hash a file, and keep that for as long as it has this state, unless it changed meanwhile or just before."""
        sha256 = hash_of(path, state.num_bytes)
        if _is_settled(state) and FileState.of(os.stat(path)) == state:
            self._known[state] = sha256
        return sha256

    def of_written(self, path: str) -> FileIdentity:
        """Compute the identity of a file that processes have mapped for writing, while they are frozen.

        Linux changes the time of a file at the first write to a page since that was flushed, and at no other. So it is
        flushed, and its time shows any later write; but for a file in memory, which is hashed each time.
        """
        flush(Path(path))
        state = FileState.of(os.stat(path))
        sha256 = self._flushed.get(state) or hash_of(path, state.num_bytes)
        if _is_settled(state) and not is_in_memory(path):
            self._flushed[state] = sha256
        return FileIdentity(state.num_bytes, state.mtime_ns, sha256)

    def remember(self, path: str, identity: FileIdentity) -> None:
        """Take over the identity that an image has of a file, if the file has its length and time."""
        state = FileState.of(os.stat(path))
        if (state.num_bytes, state.mtime_ns) == (identity.num_bytes, identity.mtime_ns):
            self._known[state] = identity.sha256


def _is_settled(state: FileState) -> bool:
    return time.time_ns() - state.mtime_ns > _SETTLED_NS


IDENTITIES: Final = Identities()
"""The identities of files that processes have mapped, kept for the next image."""


def hash_of(path: str, num_bytes: int) -> str:
    """Hash the first ``num_bytes`` of a file: SHA-256 of all of them, or of samples if they are many."""
    return _hash_pieces(path, samples_of(num_bytes))


def hash_all(path: str, num_bytes: int) -> str:
    """SHA-256 of the first ``num_bytes`` of a file, however many they are."""
    return _hash_pieces(path, [(0, num_bytes)])


def samples_of(num_bytes: int) -> list[tuple[int, int]]:
    """Start and length of the pieces of a file of this length that are hashed.

    >>> samples_of(1000), len(samples_of(1 << 40)), sum(length for _, length in samples_of(1 << 40)) >> 20
    ([(0, 1000)], 258, 18)
    """
    if num_bytes <= WHOLE_BYTES:
        return [(0, num_bytes)]
    apart = (num_bytes - 2 * _EDGE_BYTES) // _NUM_SAMPLES
    between = [(_EDGE_BYTES + number * apart, _SAMPLE_BYTES) for number in range(_NUM_SAMPLES)]
    return [(0, _EDGE_BYTES), *between, (num_bytes - _EDGE_BYTES, _EDGE_BYTES)]


def _hash_pieces(path: str, pieces: Sequence[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_BLOCK_BYTES, max(length for _, length in pieces) or 1)))
    with open(path, "rb", buffering=0) as file:
        for start, left in pieces:
            file.seek(start)
            while left > 0:
                count = file.readinto(buffer[: min(left, len(buffer))])
                if not count:
                    break
                digest.update(buffer[:count])
                left -= count
    return digest.hexdigest()


def has_identity(path: str, identity: FileIdentity) -> bool:
    """Whether the file is the same: of the same length, and of the same time or the same bytes."""
    info = os.stat(path)
    if info.st_size != identity.num_bytes:
        return False
    return info.st_mtime_ns == identity.mtime_ns or hash_of(path, identity.num_bytes) == identity.sha256
