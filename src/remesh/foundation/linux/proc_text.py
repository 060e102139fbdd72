"""Parsers of the texts in ``/proc`` about a process: memory areas, open files, status. Nothing is read.

Paths of mapped and open files are as the process sees them. Source: proc(5).
"""

from __future__ import annotations

import enum
import functools
import re
from dataclasses import dataclass
from typing import Final

from remesh.foundation.errors import PeerError

SPECIAL_AREAS: Final = ("[vvar]", "[vvar_vclock]", "[vdso]", "[vsyscall]")
"""Areas that the kernel puts into every process: never saved, moved into place at restore."""
_DELETED: Final = " (deleted)"
_SHARED_MEMORY: Final = ("/dev/zero (deleted)", "/memfd:", "/dev/shm/")
_MAPS_LINE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) (\S+) (\d+)\s*(.*)")


class AreaKind(enum.Enum):
    """The source of the content of an area of memory."""

    ANONYMOUS = "anonymous"  # memory of its own, the heap and the stack too
    PRIVATE_FILE = "private-file"  # a named file; pages it changed are its own
    SHARED_FILE = "shared-file"  # a named file that holds every change
    LOST_FILE = "lost-file"  # a private mapping of a file that has no name any more
    SPECIAL = "special"  # see SPECIAL_AREAS
    CARRIED = "carried"  # memory shared with other processes: anonymous, a memfd, a file in /dev/shm
    FOREIGN = "foreign"  # devices, memory of System V: what an image cannot hold


@dataclass(frozen=True, slots=True)
class Area:
    """One line of ``/proc/P/maps``. ``start < end``, both multiples of the page size."""

    start: int
    end: int
    protection: str  # "rwxp": read, write, execute, private or shared; "-" for what is not
    offset: int  # bytes into the file
    device: str  # "major:minor" of the file, in hex
    inode: int  # 0 for anonymous memory
    path: str  # "" for anonymous memory; "[heap]", "[stack]"; else as the process sees it, may end with " (deleted)"

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def kind(self) -> AreaKind:
        return _kind_of(self.path, self.protection.endswith("s"))


@functools.lru_cache(4096)  # asked ten times for each of hundreds of areas while a process is frozen
def _kind_of(path: str, shared: bool) -> AreaKind:
    if path in SPECIAL_AREAS:
        return AreaKind.SPECIAL
    if shared and path.startswith(_SHARED_MEMORY):
        return AreaKind.CARRIED
    if not path or (path.startswith("[") and not shared):
        return AreaKind.FOREIGN if shared else AreaKind.ANONYMOUS
    if not path.startswith("/") or path.startswith(("/dev/", "/SYSV", "/memfd:", "/anon_hugepage")):
        return AreaKind.FOREIGN
    if path.endswith(_DELETED):
        return AreaKind.FOREIGN if shared else AreaKind.LOST_FILE
    return AreaKind.SHARED_FILE if shared else AreaKind.PRIVATE_FILE


@dataclass(frozen=True, slots=True)
class Descriptor:
    """An open file as ``/proc/P/fd`` and ``fdinfo`` show it."""

    number: int
    link: str  # "/path", "pipe:[12]", "socket:[12]", "anon_inode:[eventpoll]"
    position: int
    flags: int  # of open(2), octal in fdinfo; with O_CLOEXEC
    info: tuple[tuple[str, str], ...]  # the other lines of fdinfo, in order; a name may come often


def parse_maps(text: str) -> list[Area]:
    """The areas of ``/proc/P/maps``, in order of address."""
    return list(map(_parse_area, text.splitlines()))


@functools.lru_cache(4096)  # nearly all areas are what they were at the last look
def _parse_area(line: str) -> Area:
    match = _MAPS_LINE.fullmatch(line)
    if match is None:
        raise PeerError(f"reading a memory map: the line {line!r} is of no known form; report the kernel's version")
    start, end, protection, offset, device, inode, path = match.groups()
    path = path.replace("\\012", "\n")
    return Area(int(start, 16), int(end, 16), protection, int(offset, 16), device, int(inode), path)


def parse_fdinfo(number: int, link: str, text: str) -> Descriptor:
    """Parse one descriptor, from its link and its ``fdinfo``."""
    pairs = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in text.splitlines())]
    known = dict(pairs)
    rest = tuple(pair for pair in pairs if pair[0] not in ("pos", "flags", "mnt_id", "ino"))
    return Descriptor(number, link, int(known["pos"]), int(known["flags"], 8), rest)


def parse_status(text: str) -> dict[str, str]:
    """Parse ``/proc/P/status`` into values by name of line."""
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def parse_stat(text: str) -> list[str]:
    """The fields of ``/proc/P/stat``; field n of proc(5) has index n - 1."""
    head, _, tail = text.rpartition(")")
    number, _, name = head.partition(" (")
    return [number, name, *tail.split()]
