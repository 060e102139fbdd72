"""File locks of a process tree: read from the kernel, and taken again at restore before any process runs.

    flock           of an open file   taken again by init, which opens the file for the stubs that inherit it
    F_OFD_SETLK     likewise, of a range of its bytes
    F_SETLK         of a process      taken again by its stub, as the last thing that is done with its descriptors

A restore fails if another process has such a lock: both would believe that they hold it alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from remesh.carried.images.form.kinds import ImageRefusal, NotImageable
from remesh.carried.images.form.tree_format import FileLock, LockKind
from remesh.foundation.errors import StorageError
from remesh.foundation.linux.proc_text import Descriptor
from remesh.foundation.linux.ptrace import Tracee

_STRUCT_FLOCK: Final = struct.Struct("hh4xqqi4x")  # type, whence, start, length, process
_OFD_SETLK: Final = 37
_TAKEN: Final = (errno.EAGAIN, errno.EACCES)
_TO_THE_END: Final = "EOF"


def locks_of(pid: int, inner_pid: int, descriptor: Descriptor, file: int) -> Iterator[tuple[object, FileLock]]:
    """The locks that a descriptor shows, each with what it is known by: other descriptors show it, too.

    Raises `NotImageable` for a lease.
    """
    for name, text in descriptor.info:
        if name != "lock":
            continue
        _, kind, _, way, _, inode, start, end = text.split()
        if kind not in {each.value for each in LockKind}:
            why = f"it has a {kind.lower()} of its file, which images do not hold; give it back"
            raise NotImageable(
                f"dumping process {pid}", [ImageRefusal(f"descriptor {descriptor.number}, {descriptor.link}", why)]
            )
        is_own = LockKind(kind) is LockKind.PROCESS
        length = 0 if end == _TO_THE_END else int(end) + 1 - int(start)
        lock = FileLock(
            *(LockKind(kind), way == "WRITE", int(start), length, descriptor.link, file),
            *((inner_pid, descriptor.number) if is_own else (0, 0)),
        )
        yield (kind, pid, inode, start, end) if is_own else (kind, file, start, end), lock


def can_take(lock: FileLock, descriptor: Descriptor) -> bool:
    """Whether the lock of a process can be taken by this descriptor, which has to be open for what is locked."""
    mode = descriptor.flags & os.O_ACCMODE
    return mode != (os.O_RDONLY if lock.is_exclusive else os.O_WRONLY)


def take_of_files(locks: Sequence[FileLock], files: Sequence[int]) -> None:
    """Take the locks of open files again, by descriptors of this process. Raises `StorageError`."""
    for lock in locks:
        try:
            if lock.kind is LockKind.FLOCK:
                fcntl.flock(files[lock.file], (fcntl.LOCK_EX if lock.is_exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            elif lock.kind is LockKind.OPEN_FILE:
                fcntl.fcntl(files[lock.file], _OFD_SETLK, _record_of(lock))
        except OSError as error:
            raise _taken_by_another(lock, error) from error


def take_of_process(leader: Tracee, room: int, locks: Sequence[FileLock]) -> None:
    """Let a process take its locks again; ``room`` is memory of its own. It closes no file of them after that.

    Raises `StorageError`.
    """
    for lock in locks:
        leader.write(room, _record_of(lock))
        try:
            leader.call("fcntl", lock.number, fcntl.F_SETLK, room)
        except OSError as error:
            raise _taken_by_another(lock, error) from error


def _taken_by_another(lock: FileLock, error: OSError) -> StorageError:
    why = "another process has one now" if error.errno in _TAKEN else error.strerror
    return StorageError(
        f"taking the lock of {lock.path} again, which the program held at the image: {why}; end what uses the "
        "file, or wait for it, and restart"
    )


def _record_of(lock: FileLock) -> bytes:
    kind = fcntl.F_WRLCK if lock.is_exclusive else fcntl.F_RDLCK
    return _STRUCT_FLOCK.pack(kind, os.SEEK_SET, lock.start, lock.num_bytes, 0)
