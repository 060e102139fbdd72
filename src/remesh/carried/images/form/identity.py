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
from typing import Final, NamedTuple, Self

from remesh.carried.images.form.format import FileIdentity
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


class FileState(NamedTuple):
    """The state of a file on this machine. If it is the same, so are the bytes: the kernel sets the time of change."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: str) -> Self:
        info = os.stat(path)
        return cls(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


class Identities:
    """A cache of the identities of files: shared libraries are hashed once for all images of a process."""

    def __init__(self) -> None:
        self._known: dict[FileState, str] = {}
        self._flushed: dict[FileState, str] = {}  # the same of files that are mapped for writing

    def of(self, path: str) -> FileIdentity:
        """Compute the identity of a file."""
        state = FileState.of(path)
        sha256 = self._known.get(state)
        if sha256 is None:
            sha256 = hash_of(path, state.num_bytes)
            # It is kept unless the file changed meanwhile, or just before.
            if _is_settled(state) and FileState.of(path) == state:
                self._known[state] = sha256
        return FileIdentity(state.num_bytes, state.mtime_ns, sha256)

    def gather(self, paths: Iterable[str]) -> None:
        """Hash the files of which nothing is known; unreadable ones are left out."""
        for path in paths:
            with contextlib.suppress(OSError):
                self.of(path)

    def of_written(self, path: str) -> FileIdentity:
        """Compute the identity of a file that processes have mapped for writing, while they are frozen.

        Linux changes the time of a file at the first write to a page since that was flushed, and at no other. So it is
        flushed, and its time shows any later write; but for a file in memory, which is hashed each time.
        """
        flush(Path(path))
        state = FileState.of(path)
        sha256 = self._flushed.get(state) or hash_of(path, state.num_bytes)
        if _is_settled(state) and not is_in_memory(path):
            self._flushed[state] = sha256
        return FileIdentity(state.num_bytes, state.mtime_ns, sha256)


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
