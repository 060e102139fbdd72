"""File format of ``tree.json``: relatives and open files of a process tree, what those hold, and locks of files.

An *open file* is what ``open``, ``pipe`` or ``socket`` makes: a position and flags of its own. Descriptors of one or
several processes lead to it (``files.json`` of each), by ``dup`` and ``fork``. A *carried file* is one whose bytes the
image holds, since no other place keeps them: it has no name any more, or it stands in memory.
"""

from __future__ import annotations

import array
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remesh.carried.images.form.family import Kin, plan_family
from remesh.carried.images.form.format import FileIdentity


def _check(good: bool, message: str) -> None:
    if not good:
        raise ValueError(message)


class FileKind(enum.Enum):
    """The kind of an open file."""

    FILE = "file"
    CARRIED = "carried"
    FOLDER = "folder"
    DEVICE = "device"  # /dev/null and its kind
    PIPE = "pipe"
    EVENT = "event"  # an eventfd
    SOCKET = "socket"  # of AF_UNIX
    POLL = "poll"  # an epoll instance


@dataclass(frozen=True, slots=True)
class PollWatch:
    """One watch of an epoll instance: an open file by the number that a process has for it."""

    pid: int  # inner id of a process that has both
    poll_number: int  # its descriptor for the instance
    number: int  # its descriptor for the open file
    events: int
    data: int

    def __post_init__(self) -> None:
        good = 0 <= self.events < 1 << 32 and 0 <= self.data < 1 << 64
        _check(good, f"descriptor {self.number} is watched for {self.events:#x}, with {self.data:#x}")


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file of ``tree.json``."""

    kind: FileKind
    flags: int  # of open(2), without O_CLOEXEC, which belongs to descriptors
    path: str  # of named files, folders and devices; "" otherwise
    position: int  # of files
    content: FileIdentity | None  # of named files: length and hash at the image
    target: int  # which of the tree's carried files, pipes or sockets, from 0; -1 for other kinds
    count: int  # of an eventfd
    watches: tuple[PollWatch, ...]  # of an epoll instance


@dataclass(frozen=True, slots=True)
class CarriedFile:
    """A file whose bytes stand in ``carried.bin``, behind those of the one before."""

    in_memory: bool  # it stands in memory, shared by those who have it mapped or open; else on a disk, without a name
    names: tuple[str, ...]  # under which it stands in /dev/shm
    folder: str  # on a disk: where its last name was
    mode: int  # its permissions
    num_bytes: int  # its length, with holes
    runs: bytes  # offset and length of each piece that is not a hole, in order, as numbers of 64 bits

    def __post_init__(self) -> None:
        _check(len(self.runs) % 16 == 0, f"pieces of a carried file have {len(self.runs)} bytes")
        end = 0
        for start, num_bytes in self.pieces():
            _check(start >= end and num_bytes >= 1, "pieces of a carried file are not in order")
            end = start + num_bytes
        _check(end <= self.num_bytes, f"a carried file has {self.num_bytes} bytes, and pieces up to {end}")
        for name in self.names:
            parts = name.split("/")
            good = parts[:3] == ["", "dev", "shm"] and len(parts) == 4 and parts[3] not in ("", ".", "..")
            _check(good and "\0" not in name, f"a carried file has the name {name!r}, expected one in /dev/shm")

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Offset and length of each piece."""
        numbers = iter(array.array("Q", self.runs))
        return zip(numbers, numbers, strict=True)

    @property
    def num_stored_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.pieces())


@dataclass(frozen=True, slots=True)
class PipeState:
    """A pipe. Its ends are open files; one that no process has is closed."""

    capacity: int
    data: bytes  # what was in it

    def __post_init__(self) -> None:
        _check(len(self.data) <= self.capacity, f"a pipe of {self.capacity} bytes has {len(self.data)}")


@dataclass(frozen=True, slots=True)
class SocketPart:
    """A message on its way, or a piece of a stream."""

    data: bytes
    files: tuple[int, ...]  # open files that come with it, by number


@dataclass(frozen=True, slots=True)
class SocketState:
    """A socket of AF_UNIX."""

    kind: int  # SOCK_STREAM, SOCK_DGRAM or SOCK_SEQPACKET
    listens: bool
    is_connected: bool
    name: bytes  # of one that listens
    mode: int  # permissions of the file of that name; 0 if there is none
    backlog: int  # of one that listens
    peer: int  # which socket is the other end, from 0; -1 if it is closed or there is none
    listener: int  # which socket has not accepted its connection yet, from 0; -1 for none
    shutdown: int  # 1: nothing comes any more; 2: nothing can be sent
    send_bytes: int  # SO_SNDBUF, as it is set
    options: dict[int, bytes]  # other options, by number
    queue: tuple[SocketPart, ...]  # what has come and was not read

    def __post_init__(self) -> None:
        _check(self.kind in (1, 2, 5), f"a socket is of kind {self.kind}")
        is_absolute = self.name.startswith((b"/", b"\0"))
        _check(self.listens == is_absolute and (is_absolute or not self.name), f"a socket has the name {self.name!r}")
        _check(not (self.listens and self.is_connected), "a socket listens and is connected")
        _check(self.is_connected or (self.peer < 0 and not self.queue), "a socket without a peer has messages")


class LockKind(enum.Enum):
    """The kind of a lock, in the kernel's word."""

    FLOCK = "FLOCK"  # of an open file, whole
    OPEN_FILE = "OFDLCK"  # of an open file, a range
    PROCESS = "POSIX"  # of a process, a range


@dataclass(frozen=True, slots=True)
class FileLock:
    """A lock of a file."""

    kind: LockKind
    is_exclusive: bool
    start: int  # of a range, in bytes
    num_bytes: int  # 0: to the end of the file, wherever that is
    path: str  # as the process sees it, for errors
    file: int  # the open file: which of the tree's, from 0
    pid: int  # of `LockKind.PROCESS`: inner id of the process that has it; else 0
    number: int  # and its descriptor

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_bytes < 0 or self.start + self.num_bytes >= 1 << 63:
            raise ValueError(f"a lock of {self.path} is of {self.num_bytes} bytes from {self.start}")


@dataclass(frozen=True, slots=True)
class TreeState:
    """``tree.json``."""

    kin: tuple[Kin, ...]  # the root first
    files: tuple[OpenFile, ...]
    carried: tuple[CarriedFile, ...]
    pipes: tuple[PipeState, ...]
    sockets: tuple[SocketState, ...]
    locks: tuple[FileLock, ...]

    def __post_init__(self) -> None:
        _check(bool(self.kin) and self.kin[0].exit_status is None, "the root of the tree does not live")
        plan_family(self.kin)
        targets: dict[FileKind, Sequence[object]] = {
            FileKind.CARRIED: self.carried,
            FileKind.PIPE: self.pipes,
            FileKind.SOCKET: self.sockets,
        }
        for at, file in enumerate(self.files):
            expected = range(len(targets[file.kind])) if file.kind in targets else (-1,)
            strangers = {watch.pid for watch in file.watches} - {each.pid for each in self.living}
            _check(not strangers, f"open file {at} is watched by the processes {sorted(strangers)}")
            _check(file.target in expected, f"open file {at} ({file.kind.value}) is of number {file.target}")
        for lock in self.locks:
            _check(lock.file in range(len(self.files)), f"a lock is of file {lock.file}")
        for at, one in enumerate(self.sockets):
            peer = self.sockets[one.peer] if 0 <= one.peer < len(self.sockets) else None
            good = one.peer == -1 if peer is None else peer.peer == at != one.peer and peer.kind == one.kind
            _check(good, f"socket {at} is connected with {one.peer}")
            waits_at = self.sockets[one.listener] if 0 <= one.listener < len(self.sockets) else None
            good = one.listener == -1 if waits_at is None else waits_at.listens and one.is_connected and one.peer == -1
            _check(good, f"socket {at} waits for socket {one.listener}")
            sent = {file for part in one.queue for file in part.files}
            _check(sent <= set(range(len(self.files))), f"socket {at} has open files {sorted(sent)} on their way")

    @property
    def living(self) -> list[Kin]:
        """The processes that have not ended; the root first."""
        return [each for each in self.kin if each.exit_status is None]
