"""By what is a file known again at restore, on this machine or another? Length, time, and a hash of its bytes."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Final

from remesh.files import flush
from remesh.images.format import FileIdentity
from remesh.linux.calls import is_in_memory

_BLOCK_BYTES: Final = 4 << 20
_SETTLED_NS: Final = 2_000_000_000
"""A file that was changed less than this ago may change again without another time: clocks of files have ticks."""
_Key = tuple[int, int, int, int]


class Identities:
    """A cache of the identities of files, with the hashes of files that have not changed since.

    Shared libraries are hashed once for all images of a process.
    """

    def __init__(self) -> None:
        self._known: dict[_Key, str] = {}  # device, inode, length, time -> hash
        self._flushed: dict[_Key, str] = {}  # the same of files that are mapped for writing

    def of(self, path: str, *, num_bytes: int | None = None) -> FileIdentity:
        """Compute the identity of a file; with ``num_bytes`` only its beginning is hashed and the length is that."""
        info = os.stat(path)
        length = info.st_size if num_bytes is None else num_bytes
        key = (info.st_dev, info.st_ino, length, info.st_mtime_ns)
        if key not in self._known:
            self._known[key] = hash_of(path, length)
        return FileIdentity(length, info.st_mtime_ns, self._known[key])

    def of_written(self, path: str) -> FileIdentity:
        """Compute the identity of a file that processes have mapped for writing, while they stand still.

        Linux changes the time of a file at the first write to a page since that was flushed, and at no other. So it is
        flushed, and its time tells of any later write; but for a file in memory, which is hashed each time.
        """
        flush(Path(path))
        info = os.stat(path)
        key = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
        sha256 = self._flushed.get(key) or hash_of(path, info.st_size)
        if time.time_ns() - info.st_mtime_ns > _SETTLED_NS and not is_in_memory(path):
            self._flushed[key] = sha256
        return FileIdentity(info.st_size, info.st_mtime_ns, sha256)

    def remember(self, path: str, identity: FileIdentity) -> None:
        """Take over what an image says of a file, if that has its length and time."""
        info = os.stat(path)
        if identity.sha256 and (info.st_size, info.st_mtime_ns) == (identity.num_bytes, identity.mtime_ns):
            self._known[info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns] = identity.sha256


IDENTITIES: Final = Identities()
"""The identities of files that processes have mapped, kept for the next image."""


def hash_of(path: str, num_bytes: int) -> str:
    """SHA-256 of the first ``num_bytes`` of a file."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_BLOCK_BYTES, max(num_bytes, 1))))
    with open(path, "rb", buffering=0) as file:
        left = num_bytes
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
