"""What in a process stands against an image of it? `check_imageable` looks from outside and stops nothing.

Each check yields refusals: the offender by name, the reason, and what to do. `kind_of` sorts open files
into the kinds that an image holds.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from remesh.images import nameless
from remesh.images.format import FileKind
from remesh.images.kinds import ROOM_PATH, ImageRefusal
from remesh.images.machine import check_platform
from remesh.linux.proc_text import Area, AreaKind, Descriptor
from remesh.linux.procfs import (
    children_of,
    deleted_files_of_others,
    read_areas,
    read_descriptors,
    read_status,
    seen_from_here,
)

_HARMLESS_DEVICES: Final = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9)}  # null, zero, full, random, urandom
_TTY_MAJORS: Final = {4, 5, *range(136, 144)}
_BLOCK_BYTES: Final = 512  # of what stat counts as blocks
_WHY_ANON: Final = {
    "[eventpoll]": "an epoll instance; images do not hold it: leave out the event loop of asyncio or select.epoll",
    "[io_uring]": "an io_uring; the kernel gives no access to its state",
    "[timerfd]": "a timer descriptor; images do not hold it",
    "[signalfd]": "a signal descriptor; images do not hold it",
    "inotify": "a watch on files; images do not hold it",
    "[perf_event]": "a performance counter; it belongs to this machine",
    "[pidfd]": "a handle on another process; images hold one process",
    "[userfaultfd]": "page faults served by the program itself; images do not hold that",
}


def check_imageable(pid: int, areas: list[Area] | None = None) -> list[ImageRefusal]:
    """Everything about a running process that an image cannot hold, each by name; empty when it can be imaged.

    ``areas`` is its memory map, if that has been read. Nothing is stopped. Raises `ConfigError` on another platform,
    `ProcessLookupError` or `FileNotFoundError` when there is no such process.
    """
    check_platform()
    descriptors = read_descriptors(pid)
    return [
        *_check_process(pid),
        *_check_areas(pid, read_areas(pid) if areas is None else areas),
        *(refusal for descriptor in descriptors if (refusal := _check_descriptor(pid, descriptor))),
        *_check_pipes(descriptors),
        *_check_nameless(pid, descriptors),
    ]


def _check_process(pid: int) -> Iterator[ImageRefusal]:
    status = read_status(pid)
    if status["State"][0] in "ZX":
        yield ImageRefusal(f"process {pid}", "it has ended")
    if status["State"][0] == "T":
        yield ImageRefusal(f"process {pid}", "it is stopped by a signal; let it go on with SIGCONT")
    if int(status["TracerPid"]) not in (0, os.getpid()):
        yield ImageRefusal(f"process {pid}", f"process {status['TracerPid']} traces it; end that debugger")
    if status.get("Seccomp", "0") != "0":
        yield ImageRefusal(f"process {pid}", "it runs under a seccomp filter, which would stop what a restore must do")
    if "shstk" in status.get("x86_Thread_features", ""):
        yield ImageRefusal(f"process {pid}", "it has a shadow stack; set GLIBC_TUNABLES=glibc.cpu.x86_shstk=off")
    for child in children_of(pid):
        try:
            name = Path(f"/proc/{child}/comm").read_text().strip()
        except OSError:
            name = "ended"
        yield ImageRefusal(f"child process {child} ({name})", "images hold one process; wait until it has ended")
    timers = Path(f"/proc/{pid}/timers")
    if timers.exists() and timers.read_text().strip():
        yield ImageRefusal(f"process {pid}", "it has POSIX timers (timer_create); images do not hold them")


def _check_areas(pid: int, areas: list[Area]) -> Iterator[ImageRefusal]:
    known: set[tuple[str, str, int]] = set()  # a library has five areas and is looked at once
    for area in areas:
        kind, file = area.kind, (area.path, area.device, area.inode)
        if kind is AreaKind.FOREIGN:
            yield ImageRefusal(
                _name_of(area), "shared memory without a file, or of a device; images hold private memory and files"
            )
        elif kind is AreaKind.LOST_FILE:
            yield ImageRefusal(
                _name_of(area), "its file was deleted or replaced since it was mapped; start the program again"
            )
        elif kind in (AreaKind.PRIVATE_FILE, AreaKind.SHARED_FILE) and file not in known:
            known.add(file)
            if is_bound_by_the_site(area.path):
                continue
            try:
                info = os.stat(seen_from_here(pid, area.path))
            except OSError as error:
                yield ImageRefusal(_name_of(area), f"its file cannot be found: {error.strerror}")
                continue
            device = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}"
            if device == area.device and info.st_ino != area.inode:
                yield ImageRefusal(_name_of(area), "another file stands under its name now; start the program again")


def _name_of(area: Area) -> str:
    return f"memory {area.start:#x}-{area.end:#x} {area.protection} {area.path or 'without a name'}"


def kind_of(pid: int, descriptor: Descriptor) -> FileKind | None:
    """What a descriptor leads to; None when an image cannot hold it."""
    link = descriptor.link
    if link.startswith("pipe:"):
        return FileKind.PIPE
    if link == "anon_inode:[eventfd]":
        return FileKind.EVENT
    if not link.startswith("/"):
        return None
    try:
        info = os.stat(f"/proc/{pid}/fd/{descriptor.number}")
    except OSError:
        return None
    if stat.S_ISREG(info.st_mode) and _is_named(pid, link, info):
        return FileKind.FILE
    if stat.S_ISREG(info.st_mode) and info.st_nlink == 0 and not link.startswith("/memfd:"):
        return FileKind.NAMELESS
    if stat.S_ISDIR(info.st_mode) and _is_named(pid, link, info):
        return FileKind.FOLDER
    if stat.S_ISCHR(info.st_mode) and (os.major(info.st_rdev), os.minor(info.st_rdev)) in _HARMLESS_DEVICES:
        return FileKind.DEVICE
    return None


def _is_named(pid: int, path: str, info: os.stat_result) -> bool:
    """Whether the file is found under the name by which it was opened."""
    try:
        named = os.stat(seen_from_here(pid, path))
    except OSError:
        return False
    return (named.st_dev, named.st_ino) == (info.st_dev, info.st_ino)


def _check_descriptor(pid: int, descriptor: Descriptor) -> ImageRefusal | None:
    if kind_of(pid, descriptor) is not None:
        return None
    link = descriptor.link
    what = f"descriptor {descriptor.number}, {link}"
    if link.startswith("socket:"):
        why = "a connection of the program's own; its other end is not in the image: close it first"
        return ImageRefusal(what, why)
    if link.startswith("anon_inode:"):
        why = _WHY_ANON.get(link.removeprefix("anon_inode:"), "a kernel object that images do not hold")
        return ImageRefusal(what, why)
    if link.startswith("/memfd:"):
        return ImageRefusal(what, "shared memory without a file; images hold private memory and files")
    try:
        mode = os.stat(f"/proc/{pid}/fd/{descriptor.number}")
        if os.readlink(f"/proc/{pid}/fd/{descriptor.number}") != link:
            return None  # closed since, and its number used again: it is looked at once the process stands still
    except OSError:  # closed since
        return None
    if stat.S_ISCHR(mode.st_mode):
        if os.major(mode.st_rdev) in _TTY_MAJORS:
            return ImageRefusal(what, "a terminal; redirect it to a file")
        return ImageRefusal(what, "a device; its state is in the driver, not in the process")
    if stat.S_ISFIFO(mode.st_mode):
        return ImageRefusal(what, "a named pipe; its other end is not in the image: close it first")
    return ImageRefusal(what, "the file has another name now, or another file has its name; open it again")


def _check_pipes(descriptors: list[Descriptor]) -> Iterator[ImageRefusal]:
    ends: dict[str, set[int]] = {}
    for descriptor in descriptors:
        if descriptor.link.startswith("pipe:"):
            ends.setdefault(descriptor.link, set()).add(descriptor.flags & os.O_ACCMODE)
    for descriptor in descriptors:
        if descriptor.link in ends and ends[descriptor.link] != {os.O_RDONLY, os.O_WRONLY}:
            what = f"descriptor {descriptor.number}, {descriptor.link}"
            why = "a pipe whose other end is in another process; images hold pipes with both ends inside"
            yield ImageRefusal(what, why)


def _check_nameless(pid: int, descriptors: list[Descriptor]) -> Iterator[ImageRefusal]:
    """Files without a name are copied while the process stands still, and are another's own afterwards."""
    found: dict[tuple[int, int], Descriptor] = {}
    num_bytes = 0
    for descriptor in descriptors:
        if kind_of(pid, descriptor) is not FileKind.NAMELESS:
            continue
        path, what = f"/proc/{pid}/fd/{descriptor.number}", f"descriptor {descriptor.number}, {descriptor.link}"
        try:
            info = os.stat(path)
        except OSError:  # closed since
            continue
        if (info.st_dev, info.st_ino) in found:
            continue
        found[info.st_dev, info.st_ino] = descriptor
        num_bytes += info.st_blocks * _BLOCK_BYTES
        if num_bytes > nameless.MAX_BYTES:
            why = f"files without a name hold {num_bytes} bytes, images carry at most {nameless.MAX_BYTES}"
            yield ImageRefusal(what, f"{why}; give it a name")
        if not os.access(path, os.R_OK):
            yield ImageRefusal(what, "a file without a name that may not be read; give it a name")
    for other, file in deleted_files_of_others(pid) if found else ():
        if file in found:
            what = f"descriptor {found[file].number}, {found[file].link}"
            yield ImageRefusal(what, f"a file without a name that process {other} has open, too; give it a name")


def is_bound_by_the_site(path: str) -> bool:
    """Whether a path leads to the channel, the arena or the logs, which the next site has of its own."""
    return path.startswith(f"{ROOM_PATH}/")
