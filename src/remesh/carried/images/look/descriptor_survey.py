"""Survey of a frozen tree's open files: which descriptors share one, by kcmp.

The kernel answers whether two descriptors lead to the same open file (kcmp); only those that look alike are compared.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import termios
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from remesh.carried.images.form.carried import CarriedSource, describe_carried, key_of
from remesh.carried.images.form.format import DescriptorState, FileIdentity, FilesState, is_written
from remesh.carried.images.form.identity import Identities
from remesh.carried.images.form.kinds import ImageRefusal, NotImageable, WrittenFile
from remesh.carried.images.form.locks import FileLock, LockKind, can_take, locks_of
from remesh.carried.images.form.tree_format import CarriedFile, FileKind, OpenFile, PipeState, SocketState
from remesh.carried.images.form.written_files import find_written
from remesh.carried.images.look.frozen import Frozen
from remesh.carried.images.look.frozen_process import FrozenProcess
from remesh.carried.images.look.inspection import is_bound_by_the_site, kind_of
from remesh.carried.images.look.polls import watches_of
from remesh.carried.images.look.sockets import describe_socket, inode_of
from remesh.foundation.errors import PeerError
from remesh.foundation.linux.calls import borrow_descriptor, system_call
from remesh.foundation.linux.proc_text import Area, AreaKind, Descriptor
from remesh.foundation.linux.procfs import read_descriptors, seen_from_here
from remesh.foundation.linux.unix_sockets import unix_sockets

_KCMP_FILE: Final = 0
_GET_PIPE_BYTES: Final = 1032
_SET_PIPE_BYTES: Final = 1031
_SEMAPHORE: Final = os.EFD_SEMAPHORE
"""The flag by which we keep that an eventfd is a semaphore; it is bit 0, which no flag of an open file has."""
_NONBLOCKING_SPLICE: Final = 2

_Key = tuple[str, int]


@dataclass(slots=True)
class Survey:
    """The open files of a tree."""

    processes: Sequence[FrozenProcess]
    files: list[OpenFile] = field(default_factory=list)
    descriptors: dict[int, FilesState] = field(default_factory=dict)  # by process
    carried: dict[_Key, CarriedSource] = field(default_factory=dict)  # in order of their numbers
    written: dict[str, FileIdentity] = field(default_factory=dict)  # files mapped for writing, by path
    locks: dict[object, FileLock] = field(default_factory=dict)  # by what they are known by
    pipes: dict[str, PipeState] = field(default_factory=dict)  # by the name that the kernel gives, in the same way
    sockets: dict[int, tuple[int, int]] = field(default_factory=dict)  # process and descriptor by inode, likewise
    on_their_way: list[int] = field(default_factory=list)  # this process's descriptors for open files in messages
    _holders: dict[tuple[object, ...], list[tuple[int, int, int]]] = field(default_factory=dict)
    """The holders of open files that look alike: process, descriptor, number of the open file."""

    def number_of_carried(self, key: _Key) -> int:
        return list(self.carried).index(key)

    def describe_carried(self, pid: int) -> tuple[CarriedFile, ...]:
        """The carried files; ``pid`` is one of the processes."""
        root = seen_from_here(pid, "")
        return tuple(describe_carried(source, root) for source in self.carried.values())

    def number_of_file(self, pid: int, descriptor: Descriptor, kind: FileKind) -> int | None:
        """The open file that a descriptor leads to, if it has been met."""
        for other, number, file in self._holders.setdefault(_looks_of(descriptor, kind), []):
            if system_call("kcmp", pid, other, _KCMP_FILE, descriptor.number, number) == 0:
                return file
        return None

    def add(self, pid: int, descriptor: Descriptor, kind: FileKind, file: OpenFile) -> int:
        """Take in an open file; returns its number."""
        self.files.append(file)
        self._holders[_looks_of(descriptor, kind)].append((pid, descriptor.number, len(self.files) - 1))
        return len(self.files) - 1

    def find_written(self) -> list[WrittenFile]:
        """The files that the processes may write to."""
        return find_written(self.files, self.written)

    def close(self) -> None:
        """Close the files that this process has taken in."""
        while self.on_their_way:
            os.close(self.on_their_way.pop())


def _looks_of(descriptor: Descriptor, kind: FileKind) -> tuple[object, ...]:
    return kind, descriptor.link, descriptor.flags & ~os.O_CLOEXEC, descriptor.position


def survey_tree(frozen: Frozen, identities: Identities) -> Survey:
    """All open files and all shared memory of the frozen processes."""
    survey = Survey(frozen.processes)
    for process in frozen.processes:
        for area in process.areas:
            if area.kind is AreaKind.CARRIED:
                source = survey.carried.setdefault((area.device, area.inode), CarriedSource(True, area.path))
                source.views.append((process.pid, area))
        unknown = [area for area in process.areas if area.path not in survey.written]
        survey.written |= _written_files(process.pid, unknown, identities)
    for process in frozen.processes:
        states = [_descriptor_state(survey, process.pid, each, identities) for each in read_descriptors(process.pid)]
        survey.descriptors[process.pid] = FilesState(tuple(states))
    return survey


def _written_files(pid: int, areas: list[Area], identities: Identities) -> dict[str, FileIdentity]:
    """Compute the identities of files that a frozen process has mapped for writing, by path."""
    paths = {area.path for area in areas if is_written(area) and not is_bound_by_the_site(area.path)}
    return {path: identities.of_written(seen_from_here(pid, path)) for path in paths}


def _descriptor_state(survey: Survey, pid: int, descriptor: Descriptor, identities: Identities) -> DescriptorState:
    kind = kind_of(pid, descriptor)
    if kind is None:
        why = "it has changed, or is on its way in a socket and of a kind that images do not hold; try again"
        what = f"descriptor {descriptor.number}, {descriptor.link}"
        raise NotImageable(f"dumping process {pid}", [ImageRefusal(what, why, is_passing=True)])
    file = survey.number_of_file(pid, descriptor, kind)
    if file is None:
        file = survey.add(pid, descriptor, kind, _open_file(survey, pid, descriptor, kind, identities))
    _note_locks(survey, pid, descriptor, file)
    return DescriptorState(descriptor.number, file, bool(descriptor.flags & os.O_CLOEXEC))


def _note_locks(survey: Survey, pid: int, descriptor: Descriptor, file: int) -> None:
    inner_pid = next((each.inner_pid for each in survey.processes if each.pid == pid), 0)
    if is_bound_by_the_site(descriptor.link):
        return
    for known_by, lock in locks_of(pid, inner_pid, descriptor, file):
        if lock.kind is LockKind.PROCESS and not can_take(lock, descriptor):
            continue  # another descriptor of its file can
        survey.locks.setdefault(known_by, lock)


def _open_file(survey: Survey, pid: int, descriptor: Descriptor, kind: FileKind, identities: Identities) -> OpenFile:
    link, path = descriptor.link, f"/proc/{pid}/fd/{descriptor.number}"
    flags, content, target, count = descriptor.flags & ~os.O_CLOEXEC, None, -1, 0
    if kind is FileKind.FILE and not is_bound_by_the_site(link):
        content = survey.written.get(link) or identities.of(path)
    elif kind is FileKind.CARRIED:
        key = key_of(os.stat(path))
        in_memory = link.startswith(("/memfd:", "/dev/shm/"))
        survey.carried.setdefault(key, CarriedSource(in_memory, link)).path = path
        target = survey.number_of_carried(key)
    elif kind is FileKind.PIPE:
        known = survey.pipes.get(link)
        if known is None or not known.data:
            survey.pipes[link] = _pipe_state(pid, descriptor)
        target = list(survey.pipes).index(link)
    elif kind is FileKind.SOCKET:
        survey.sockets.setdefault(inode_of(link), (pid, descriptor.number))
        target = list(survey.sockets).index(inode_of(link))
    elif kind is FileKind.EVENT:
        info = dict(descriptor.info)
        count = int(info["eventfd-count"], 16)
        flags |= _SEMAPHORE if info.get("eventfd-semaphore", "0") != "0" else 0
    is_named = kind in (FileKind.FILE, FileKind.FOLDER, FileKind.DEVICE)
    watches = tuple(watches_of(pid, descriptor, survey.processes)) if kind is FileKind.POLL else ()
    return OpenFile(kind, flags, link if is_named else "", descriptor.position, content, target, count, watches)


# --- sockets ---


def describe_sockets(survey: Survey, identities: Identities) -> tuple[SocketState, ...]:
    """Describe the sockets of a tree; takes in the open files that are on their way in them.

    Raises `NotImageable` when a socket is among those.
    """
    known, numbers, states = unix_sockets(), list(survey.sockets), []

    def take_in(number: int) -> int:
        survey.on_their_way.append(number)
        descriptor = next(each for each in read_descriptors(os.getpid()) if each.number == number)
        return _descriptor_state(survey, os.getpid(), descriptor, identities).file

    for inode in numbers:
        peer = known[inode].peer
        at = numbers.index(peer) if peer in numbers else -1
        listener = next((at for at, other in enumerate(numbers) if inode in known[other].waiting), -1)
        states.append(describe_socket(survey.sockets[inode], known[inode], at, listener, take_in))
    if len(survey.sockets) > len(numbers):
        refusal = ImageRefusal(
            "a socket between processes", "another one is on its way in it; try again", is_passing=True
        )
        raise NotImageable("dumping sockets", [refusal])
    return tuple(states)


# --- pipes ---


def _pipe_state(pid: int, descriptor: Descriptor) -> PipeState:
    """The state of a pipe, by one of its ends; its content can be seen at a reading end only."""
    end = borrow_descriptor(pid, descriptor.number)
    try:
        capacity = fcntl.fcntl(end, _GET_PIPE_BYTES)
        reads = descriptor.flags & os.O_ACCMODE != os.O_WRONLY
        return PipeState(capacity, _pipe_content(end, capacity) if reads else b"")
    finally:
        os.close(end)


def _pipe_content(end: int, capacity: int) -> bytes:
    """The content of a pipe, which stays there: ``tee`` copies it into a pipe of this process, of the same size."""
    num_bytes = array.array("i", [0])
    fcntl.ioctl(end, termios.FIONREAD, num_bytes)
    copy_out, copy_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.fcntl(copy_in, _SET_PIPE_BYTES, capacity)
        try:
            count = system_call("tee", end, copy_in, capacity, _NONBLOCKING_SPLICE)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            count = 0
        data = os.read(copy_out, count) if count else b""
    finally:
        os.close(copy_out)
        os.close(copy_in)
    if len(data) != num_bytes[0]:
        raise PeerError(f"dumping a pipe: {num_bytes[0]} bytes are in it, {len(data)} could be copied; try again")
    return data
