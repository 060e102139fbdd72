"""Reader of ``/proc`` by process id; the texts are parsed in `proc_text`.

Ids: a process in a pid namespace has an *outer* id, which this process sees, and an *inner* one, which it sees itself.
Paths of mapped and open files are as the process sees them; `seen_from_here` leads to the same file from outside.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from remesh.foundation.linux.proc_text import Area, Descriptor, parse_fdinfo, parse_maps, parse_stat, parse_status


def read_areas(pid: int) -> list[Area]:
    """The memory map of a process."""
    return parse_maps(Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape"))


def read_status(pid: int, tid: int | None = None) -> dict[str, str]:
    """The status of a process, or of one thread of it."""
    return parse_status(Path(f"/proc/{pid}/task/{tid or pid}/status").read_text(errors="surrogateescape"))


def read_stat(pid: int) -> list[str]:
    """The fields of ``/proc/P/stat``, see `parse_stat`."""
    return parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="surrogateescape"))


def start_of(pid: int) -> int | None:
    """The start time of a process in ticks since boot; None if there is no such process, or only a zombie.

    With its id this names a process for good: ids are used again.
    """
    try:
        fields = read_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[2] in "ZX" else int(fields[21])


def work_of(pid: int) -> int:
    """A number that grows while a process makes progress: ticks of processors that it had, pages that it read."""
    try:
        fields = read_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(fields[at]) for at in (11, 13, 14))  # majflt, utime, stime


def thread_ids(pid: int) -> list[int]:
    """Ids of the threads of a process as this process sees them, the leader first."""
    return sorted((int(name) for name in os.listdir(f"/proc/{pid}/task")), key=lambda tid: (tid != pid, tid))


def inner_id(pid: int, tid: int) -> int:
    """The id that a thread has in its own innermost pid namespace."""
    return int(read_status(pid, tid)["NSpid"].split()[-1])


def read_descriptors(pid: int) -> list[Descriptor]:
    """The open files of a process, in order of number."""
    descriptors = []
    for number in sorted(int(name) for name in os.listdir(f"/proc/{pid}/fd")):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{number}")
            info = Path(f"/proc/{pid}/fdinfo/{number}").read_text()
        except FileNotFoundError:  # closed meanwhile
            continue
        descriptors.append(parse_fdinfo(number, link, info))
    return descriptors


def passing_files_of_others(pids: Collection[int]) -> Iterator[tuple[int, tuple[str, int]]]:
    """Find files without a name, and shared memory, that others than ``pids`` and this process have open or mapped.

    Each with process id, and device and inode as a memory map shows them; only of processes it may look into.
    """
    for other in filter(str.isdecimal, os.listdir("/proc")):
        pid = int(other)
        if pid in pids or pid == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended, or is another user's
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    link = os.readlink(entry.path)
                    if link.endswith(" (deleted)") or link.startswith("/dev/shm/"):
                        info = os.stat(entry.path)
                        yield pid, (f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}", info.st_ino)
            text = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
            for line in text.splitlines():
                if "/dev/shm/" in line or line.endswith(" (deleted)"):
                    _, _, _, device, inode, *_ = line.split()
                    yield pid, (device, int(inode))


def children_of(pid: int) -> list[int]:
    """Ids of the child processes of a process, of all its threads; none of one that has ended."""
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for tid in thread_ids(pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # this thread ended just now
                children += map(int, Path(f"/proc/{pid}/task/{tid}/children").read_text().split())
    return children


def family_of(*pids: int) -> list[int]:
    """Ids of processes and of all that they have started and that still run, parents before their children.

    Ended ones too, until they are waited for; not a process that was handed to another parent when its own ended.
    """
    family = list(pids)
    for member in family:  # grows meanwhile
        family += [child for child in children_of(member) if child not in family]
    return family


def seen_from_here(pid: int, path: str) -> str:
    """A path by which this process reaches the file that process ``pid`` calls ``path``."""
    return f"/proc/{pid}/root{path}"
