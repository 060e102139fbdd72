"""Checks of what an image cannot hold of a process tree. `check_imageable` looks from outside and stops nothing.

Each check yields refusals: the offender by name, the reason, and what to do. `kind_of` sorts open files
into the kinds that an image holds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from remesh.carried.images.form import carried
from remesh.carried.images.form.carried import key_of
from remesh.carried.images.form.family import plan_family
from remesh.carried.images.form.kinds import SITE_PATH, ImageRefusal
from remesh.carried.images.form.platforms import check_platform
from remesh.carried.images.form.tree_format import FileKind
from remesh.carried.images.look.frozen import Frozen
from remesh.carried.images.look.process_tree import has_ended, kin_of, name_of, tree_of
from remesh.carried.images.look.sockets import check_socket, inode_of
from remesh.foundation.linux.calls import borrow_descriptor, system_call
from remesh.foundation.linux.proc_text import Area, AreaKind, Descriptor
from remesh.foundation.linux.procfs import (
    passing_files_of_others,
    read_areas,
    read_descriptors,
    read_status,
    seen_from_here,
)
from remesh.foundation.linux.unix_sockets import unix_sockets

_IN_PROCFS: Final = re.compile(r"/proc/\d+(/|$)")
_HARMLESS_DEVICES: Final = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9)}  # null, zero, full, random, urandom
_TTY_MAJORS: Final = {4, 5, *range(136, 144)}
_POLL_S: Final = 0.01
_BLOCK_BYTES: Final = 512  # of what stat counts as blocks
_NAMESPACES: Final = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
_KCMP_SHARED: Final = {"memory": 1, "descriptors": 2, "working folder": 3, "signal actions": 4}
_WHY_ANON: Final = {
    "[io_uring]": "an io_uring; the kernel gives no access to its state",
    "[timerfd]": "a timer descriptor; images do not hold it",
    "[signalfd]": "a signal descriptor; images do not hold it",
    "inotify": "a watch on files; images do not hold it",
    "[perf_event]": "a performance counter; it belongs to this machine",
    "[pidfd]": "a handle on another process; images do not hold it",
    "[userfaultfd]": "page faults served by the program itself; images do not hold that",
}


def check_imageable(pid: int) -> list[ImageRefusal]:
    """List everything about a running process and its descendants that an image cannot hold, by name; empty if nothing.

    Nothing is stopped, so what is so for a moment only is left out: what is listed was seen twice. Raises `ConfigError`
    on another platform, `ProcessLookupError` or `FileNotFoundError` when there is no such process.
    """
    check_platform()
    first = {each.what for each in _check_tree(tree_of(pid), {}) if not each.is_passing}
    if not first:
        return []
    time.sleep(_POLL_S)
    return [each for each in _check_tree(tree_of(pid), {}) if each.what in first and not each.is_passing]


def check_frozen(frozen: Frozen) -> list[ImageRefusal]:
    """Check a frozen tree, so that nothing can change any more."""
    areas = {process.pid: process.areas for process in frozen.processes}
    return [*_check_tree([*areas, *frozen.ended], areas), *_check_sharing(list(areas))]


def _check_tree(pids: list[int], areas: dict[int, list[Area]]) -> list[ImageRefusal]:
    """Refusals of each process, then those of all together; ``areas`` are the memory maps that have been read."""
    refusals: list[ImageRefusal] = []
    held = _Holdings(pids)
    for pid in pids:
        try:
            if pid != pids[0] and has_ended(pid):
                continue
            own = _check_member(pid, pids[0], read_areas(pid) if pid not in areas else areas[pid], held)
        except (FileNotFoundError, ProcessLookupError):
            if pid == pids[0]:
                raise
            continue  # it ended just now
        of_whom = "" if pid == pids[0] else f"process {pid} ({name_of(pid)}), "
        refusals += [ImageRefusal(f"{of_whom}{each.what}", each.why) for each in own]
    return [*refusals, *_check_family(pids), *_check_pipes(held), *_check_sockets(held), *_check_carried(held)]


@dataclass(slots=True)
class _Holdings:
    """The shared objects of a tree: process and descriptor by pipe, and carried files."""

    pids: list[int]
    sockets: dict[int, str] = field(default_factory=dict)  # name of one of its descriptors, by inode
    pipes: dict[str, list[tuple[int, Descriptor]]] = field(default_factory=dict)
    carried: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)  # name of it, and path if it is open


def _check_member(pid: int, root: int, areas: list[Area], held: _Holdings) -> list[ImageRefusal]:
    descriptors = read_descriptors(pid)
    for descriptor in descriptors:
        if descriptor.link.startswith("pipe:"):
            held.pipes.setdefault(descriptor.link, []).append((pid, descriptor))
        elif descriptor.link.startswith("socket:"):
            of_whom = "" if pid == root else f"process {pid} ({name_of(pid)}), "
            what = f"{of_whom}descriptor {descriptor.number}, {descriptor.link}"
            held.sockets.setdefault(inode_of(descriptor.link), what)
        elif kind_of(pid, descriptor) is FileKind.CARRIED:
            path = f"/proc/{pid}/fd/{descriptor.number}"
            with contextlib.suppress(OSError):  # closed since
                held.carried[key_of(os.stat(path))] = f"descriptor {descriptor.number}, {descriptor.link}", path
    for area in areas:
        if area.kind is AreaKind.CARRIED:
            held.carried.setdefault((area.device, area.inode), (_name_of(area), ""))
    return [
        *_check_process(pid),
        *(_check_place(pid, root) if pid != root else ()),
        *_check_areas(pid, areas),
        *(refusal for descriptor in descriptors if (refusal := _check_descriptor(pid, descriptor))),
    ]


def _check_process(pid: int) -> Iterator[ImageRefusal]:
    status = read_status(pid)
    if status["State"][0] in "ZX":
        yield ImageRefusal(f"process {pid}", "it has ended, or its first thread has")
    if status["State"][0] == "T":
        yield ImageRefusal(f"process {pid}", "it is stopped by a signal; let it go on with SIGCONT")
    if int(status["TracerPid"]) not in (0, os.getpid()):
        yield ImageRefusal(f"process {pid}", f"process {status['TracerPid']} traces it; end that debugger")
    if status.get("Seccomp", "0") != "0":
        yield ImageRefusal(f"process {pid}", "it runs under a seccomp filter, which would stop what a restore must do")
    if "shstk" in status.get("x86_Thread_features", ""):
        yield ImageRefusal(f"process {pid}", "it has a shadow stack; set GLIBC_TUNABLES=glibc.cpu.x86_shstk=off")
    timers = Path(f"/proc/{pid}/timers")
    if timers.exists() and timers.read_text().strip():
        yield ImageRefusal(f"process {pid}", "it has POSIX timers (timer_create); images do not hold them")


def _check_place(pid: int, root: int) -> Iterator[ImageRefusal]:
    """Check that a descendant is where the root of its tree is, as the same user: it is brought back there."""
    ours, theirs = read_status(root), read_status(pid)
    for name in ("Uid", "Gid"):
        if ours[name] != theirs[name]:
            yield ImageRefusal(f"process {pid}", f"it runs as another user than process {root}, which started it")
    for kind in _NAMESPACES:
        if os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/{root}/ns/{kind}"):
            yield ImageRefusal(f"process {pid}", f"it is in another {kind} namespace than process {root}")
    if os.readlink(f"/proc/{pid}/root") != os.readlink(f"/proc/{root}/root"):
        yield ImageRefusal(f"process {pid}", "it has another root folder (chroot)")


def _check_family(pids: list[int]) -> Iterator[ImageRefusal]:
    try:
        plan_family(kin_of(pids))
    except ValueError as error:
        yield ImageRefusal(f"the processes that process {pids[0]} has started", f"they cannot be made again: {error}")
    except (FileNotFoundError, ProcessLookupError):
        return  # one ended just now: it is looked at once they are frozen


def _check_sharing(pids: list[int]) -> Iterator[ImageRefusal]:
    """Refuse processes that are half threads of each other (clone with some of the flags of threads)."""
    for earlier, later in itertools.combinations(pids, 2):
        for what, kind in _KCMP_SHARED.items():
            if system_call("kcmp", earlier, later, kind, 0, 0) == 0:
                yield ImageRefusal(
                    f"process {later} ({name_of(later)})", f"it shares its {what} with process {earlier}"
                )


def _check_areas(pid: int, areas: list[Area]) -> Iterator[ImageRefusal]:
    known: set[tuple[str, str, int]] = set()  # a library has five areas and is looked at once
    for area in areas:
        kind, file = area.kind, (area.path, area.device, area.inode)
        if kind is AreaKind.FOREIGN:
            why = "memory of a device, of System V, or of a file without a name; images do not hold it"
            yield ImageRefusal(_name_of(area), why)
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
    """The kind of the open file behind a descriptor; None when an image cannot hold it."""
    link = descriptor.link
    if link.startswith("pipe:"):
        return FileKind.PIPE
    if link == "anon_inode:[eventfd]":
        return FileKind.EVENT
    if link == "anon_inode:[eventpoll]":
        return FileKind.POLL
    if link.startswith("socket:"):
        return FileKind.SOCKET  # of which domain is asked for all of them at once
    if not link.startswith("/") or _IN_PROCFS.match(link):
        return None
    try:
        info = os.stat(f"/proc/{pid}/fd/{descriptor.number}")
    except OSError:
        return None
    if stat.S_ISREG(info.st_mode) and (info.st_nlink == 0 or link.startswith(("/memfd:", "/dev/shm/"))):
        return FileKind.CARRIED
    if stat.S_ISREG(info.st_mode) and _is_named(pid, link, info):
        return FileKind.FILE
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
    if _IN_PROCFS.match(link):
        # It is opened before that process is there again. Mostly it is open for a moment only.
        return ImageRefusal(
            what, "a file about one process, which is not there yet at a restart; close it", is_passing=True
        )
    if link.startswith("anon_inode:"):
        why = _WHY_ANON.get(link.removeprefix("anon_inode:"), "a kernel object that images do not hold")
        return ImageRefusal(what, why)
    try:
        mode = os.stat(f"/proc/{pid}/fd/{descriptor.number}")
        if os.readlink(f"/proc/{pid}/fd/{descriptor.number}") != link:
            return None  # closed since, and its number used again: it is looked at once the process is frozen
    except OSError:  # closed since
        return None
    if stat.S_ISCHR(mode.st_mode):
        if os.major(mode.st_rdev) in _TTY_MAJORS:
            return ImageRefusal(what, "a terminal; redirect it to a file")
        return ImageRefusal(what, "a device; its state is in the driver, not in the process")
    if stat.S_ISFIFO(mode.st_mode):
        return ImageRefusal(what, "a named pipe; its other end is not in the image: close it first")
    return ImageRefusal(what, "the file has another name now, or another file has its name; open it again")


def _check_pipes(held: _Holdings) -> Iterator[ImageRefusal]:
    """Check that the other end of each pipe is in the tree, or gone."""
    for ends in held.pipes.values():
        modes = {descriptor.flags & os.O_ACCMODE for _, descriptor in ends}
        pid, descriptor = ends[0]
        what = f"descriptor {descriptor.number}, {descriptor.link}"
        if any(descriptor.flags & os.O_DIRECT for _, descriptor in ends):
            yield ImageRefusal(what, "a pipe of packets (O_DIRECT); images do not hold their borders")
        elif len(modes) == 1 and os.O_RDWR not in modes and not _is_closed_at_the_other_end(pid, descriptor):
            yield ImageRefusal(what, "a pipe whose other end is in a process outside; it is not in the image")


def _is_closed_at_the_other_end(pid: int, descriptor: Descriptor) -> bool:
    try:
        end = borrow_descriptor(pid, descriptor.number)
    except OSError:  # closed since
        return True
    try:
        look = select.poll()
        look.register(end, 0)
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in look.poll(0))
    finally:
        os.close(end)


def _check_sockets(held: _Holdings) -> Iterator[ImageRefusal]:
    known = unix_sockets() if held.sockets else {}
    for inode, what in held.sockets.items():
        if refusal := check_socket(what, known.get(inode), set(held.sockets)):
            yield refusal


def _check_carried(held: _Holdings) -> Iterator[ImageRefusal]:
    """Check the files whose bytes are copied while the processes are frozen, and belong to another file afterwards."""
    num_bytes = 0
    for what, path in filter(lambda one: one[1], held.carried.values()):
        try:
            info, in_memory = os.stat(path), os.readlink(path).startswith(("/memfd:", "/dev/shm/"))
        except OSError:  # closed since
            continue
        num_bytes += 0 if in_memory else info.st_blocks * _BLOCK_BYTES
        if num_bytes > carried.MAX_BYTES:
            why = f"files without a name hold {num_bytes} bytes, images carry at most {carried.MAX_BYTES}"
            yield ImageRefusal(what, f"{why}; give it a name")
        if not os.access(path, os.R_OK):
            yield ImageRefusal(what, "a file without a name that may not be read; give it a name")
    told = set()
    for other, file in passing_files_of_others(held.pids) if held.carried else ():
        if file in held.carried and (file, other) not in told:
            told.add((file, other))
            why = f"a file without a name, or shared memory, that process {other} has, too; it is not in the image"
            yield ImageRefusal(held.carried[file][0], why)


def is_bound_by_the_site(path: str) -> bool:
    """Whether a path leads to the channel, the arena or the logs, of which the next site has its own."""
    return path.startswith(f"{SITE_PATH}/")
