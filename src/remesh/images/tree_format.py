"""What do the processes of a tree have in common? ``tree.json``: relatives, open files, and what those hold.

An *open file* is what ``open`` or ``pipe`` makes: a position and flags of its own. Descriptors of one or several
processes lead to it (``files.json`` of each), by ``dup`` and ``fork``. A *carried file* is one whose bytes
the image holds, since nobody else keeps them: it has no name any more, or it stands in memory.
"""

from __future__ import annotations

import array
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remesh.images.family import Kin, plan_family
from remesh.images.format import FileIdentity


def _check(good: bool, message: str) -> None:
    if not good:
        raise ValueError(message)


class FileKind(enum.Enum):
    """What an open file is of."""

    FILE = "file"
    CARRIED = "carried"
    FOLDER = "folder"
    DEVICE = "device"  # /dev/null and its kind
    PIPE = "pipe"
    EVENT = "event"  # an eventfd


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file of ``tree.json``."""

    kind: FileKind
    flags: int  # of open(2), without O_CLOEXEC, which belongs to descriptors
    path: str  # of named files, folders and devices; "" otherwise
    position: int  # of files
    content: FileIdentity | None  # of named files: length and hash at the image
    target: int  # which of the tree's carried files or pipes, from 0; -1 for other kinds
    count: int  # of an eventfd


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
        """Offset and length of each."""
        numbers = iter(array.array("Q", self.runs))
        return zip(numbers, numbers, strict=True)

    @property
    def num_stored_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.pieces())


@dataclass(frozen=True, slots=True)
class PipeState:
    """A pipe. Its ends are open files; one that nobody has is closed."""

    capacity: int
    data: bytes  # what was in it

    def __post_init__(self) -> None:
        _check(len(self.data) <= self.capacity, f"a pipe of {self.capacity} bytes has {len(self.data)}")


@dataclass(frozen=True, slots=True)
class TreeState:
    """``tree.json``."""

    kin: tuple[Kin, ...]  # the root first
    files: tuple[OpenFile, ...]
    carried: tuple[CarriedFile, ...]
    pipes: tuple[PipeState, ...]

    def __post_init__(self) -> None:
        _check(bool(self.kin) and self.kin[0].exit_status is None, "the root of the tree does not live")
        plan_family(self.kin)
        targets: dict[FileKind, Sequence[object]] = {FileKind.CARRIED: self.carried, FileKind.PIPE: self.pipes}
        for at, file in enumerate(self.files):
            expected = range(len(targets[file.kind])) if file.kind in targets else (-1,)
            _check(file.target in expected, f"open file {at} ({file.kind.value}) is of number {file.target}")

    @property
    def living(self) -> list[Kin]:
        """Those that have not ended; the root first."""
        return [each for each in self.kin if each.exit_status is None]
