"""What is done to a file as a whole, and what do the system's errors mean in MPI?

All of it happens inside the gate (:attr:`~remesh.mpi.upper.link.Link.gate`), so no checkpoint finds a rank in
the middle.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from typing import Final

from remesh.mpi.upper import constants as k
from remesh.mpi.upper.exceptions import Exception, failure
from remesh.mpi.upper.link import link

_CLASSES: Final = {
    errno.ENOENT: "ERR_NO_SUCH_FILE",
    errno.EEXIST: "ERR_FILE_EXISTS",
    errno.EACCES: "ERR_ACCESS",
    errno.EPERM: "ERR_ACCESS",
    errno.EROFS: "ERR_READ_ONLY",
    errno.ENOSPC: "ERR_NO_SPACE",
    errno.EFBIG: "ERR_NO_SPACE",
    errno.EDQUOT: "ERR_QUOTA",
    errno.EBUSY: "ERR_FILE_IN_USE",
    errno.ETXTBSY: "ERR_FILE_IN_USE",
    errno.ENOTDIR: "ERR_BAD_FILE",
    errno.EISDIR: "ERR_BAD_FILE",
    errno.ELOOP: "ERR_BAD_FILE",
    errno.ENAMETOOLONG: "ERR_BAD_FILE",
}
"""The error class of a system's error; all others are ERR_IO."""
_ACCESS: Final = {k.MODE_RDONLY: os.O_RDONLY, k.MODE_WRONLY: os.O_WRONLY, k.MODE_RDWR: os.O_RDWR}


def failure_of(error: OSError, doing: str) -> Exception:
    """What an error of the system is in MPI."""
    return failure(_CLASSES.get(error.errno or 0, "ERR_IO"), f"{doing}: {error.strerror}")


@contextlib.contextmanager
def in_file(doing: str) -> Iterator[None]:
    """Something done to a file, between checkpoints; the system's errors become MPI's.

    Raises:
        Exception: of the class that the error has in MPI.
    """
    try:
        with link().gate:
            yield
    except OSError as error:
        raise failure_of(error, doing) from error


def check_amode(amode: int) -> None:
    """Raise ``ERR_AMODE`` unless the bits of an access mode go together. Source: MPI 4.1, section 14.2.1."""
    ways = [way for way in _ACCESS if amode & way]
    if len(ways) != 1:
        raise failure("ERR_AMODE", f"mode {amode} has {len(ways)} of MODE_RDONLY, MODE_WRONLY and MODE_RDWR; give one")
    if amode & k.MODE_RDONLY and amode & (k.MODE_CREATE | k.MODE_EXCL):
        raise failure("ERR_AMODE", "MODE_CREATE and MODE_EXCL do not go with MODE_RDONLY; open it for writing")
    if amode & k.MODE_RDWR and amode & k.MODE_SEQUENTIAL:
        raise failure("ERR_AMODE", "MODE_SEQUENTIAL does not go with MODE_RDWR; open it for one of both")


def open_file(path: str | bytes, amode: int) -> int:
    """A descriptor for a file, which it makes if the mode says so; one process at a time."""
    flags = next(flag for way, flag in _ACCESS.items() if amode & way) | os.O_CLOEXEC
    flags |= os.O_CREAT if amode & k.MODE_CREATE else 0
    flags |= os.O_EXCL if amode & k.MODE_EXCL and amode & k.MODE_CREATE else 0
    doing = f"MPI.File.Open: opening {os.fsdecode(path)}"
    with in_file(doing):
        descriptor = os.open(path, flags, 0o666)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise failure("ERR_BAD_FILE", f"{doing}: it is a folder")
        return descriptor


def flush(descriptor: int) -> None:
    """Wait until what was written is on the disk; a device without one has nothing to flush."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


@contextlib.contextmanager
def locked(descriptor: int, span: tuple[int, int], *, for_writing: bool) -> Iterator[None]:
    """Keep other processes that lock, too, out of a span of the file: from its first position to its end.

    These are POSIX locks: they hold between processes, on all hosts if the file system knows them there.
    """
    start, length = span[0], span[1] - span[0]
    fcntl.lockf(descriptor, fcntl.LOCK_EX if for_writing else fcntl.LOCK_SH, length, start, os.SEEK_SET)
    try:
        yield
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN, length, start, os.SEEK_SET)


def delete(path: str | bytes, doing: str) -> None:
    """Take a file out of its folder."""
    with in_file(f"{doing} {os.fsdecode(path)}"):
        os.unlink(path)
