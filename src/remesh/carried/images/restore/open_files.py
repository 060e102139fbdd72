"""Open files of a restored process tree: checked, truncated and opened by our init, for all that inherit them.

What the program writes to is checked and cut by the rules of `form.written_files`: here, or, of programs that write
together, by those who restore them, for all of them before any is back.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import resource
import select
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from remesh.carried.images.form.carried import remake_carried
from remesh.carried.images.form.image_reader import StoredTree
from remesh.carried.images.form.kinds import OpenFilePolicy
from remesh.carried.images.form.locks import FileLock, take_of_files
from remesh.carried.images.form.tree_format import FileKind, OpenFile, PipeState, PollWatch
from remesh.carried.images.form.written_files import (
    check_read,
    check_written,
    cut_written,
    find_written,
    tell_sampled,
)
from remesh.carried.images.look.sockets import fill_sockets, make_sockets

_AT_OPENING: Final = os.O_CREAT | os.O_EXCL | os.O_NOCTTY | os.O_TRUNC
_LAST_OF_OURS: Final = 63
"""The lowest numbers, up to this one, are left to descriptors of this process itself."""
_SPARE_DESCRIPTORS: Final = 64
_SET_PIPE_BYTES: Final = 1031


def check_and_cut(tree: StoredTree, policy: OpenFilePolicy | None) -> str:
    """Raise `StorageError` unless every file that was open, or mapped for writing, is as it was, or the policy allows
    more; then cut those that have grown, if that is the policy. None: all that is written to has been cut.

    Returns a note for the user.
    """
    doing = f"restoring {tree.root.folder}"
    named = [file for file in tree.state.files if file.kind in (FileKind.FILE, FileKind.FOLDER, FileKind.DEVICE)]
    sampled = [file.path for file in named if check_read(file, doing)]
    if policy is not None:
        mapped = {path: content for member in tree.members for path, content in member.areas.written_files().items()}
        written = find_written(tree.state.files, mapped)
        sampled += check_written(written, policy, doing)
        cut_written(written, policy)
    return tell_sampled(sampled)


@dataclass(frozen=True, slots=True)
class OpenedFiles:
    """The open files and carried files of a tree, held by this process; the stubs that it makes inherit them."""

    lowest: int  # all numbers below are the program's own
    files: tuple[int, ...]  # a descriptor for each open file
    carried: tuple[int, ...]  # and one for each carried file, readable and writable
    watches: dict[int, list[PollWatch]]  # what epoll instances look at, by the process that asks for it
    locks: dict[int, list[FileLock]]  # of files, by the process that has them; of 0, those of open files


@contextlib.contextmanager
def opened_files(tree: StoredTree) -> Iterator[OpenedFiles]:
    """Open every file of a tree, at its position, filled with what it held. Raises `StorageError`."""
    numbers = [each.number for member in tree.members for each in member.files.descriptors]
    lowest = max(max(numbers, default=0), _LAST_OF_OURS) + 1
    _allow_descriptors(lowest + len(tree.state.files) + len(tree.state.carried) + _SPARE_DESCRIPTORS)
    with contextlib.ExitStack() as held:

        def keep(descriptor: int) -> int:
            high = fcntl.fcntl(descriptor, fcntl.F_DUPFD, lowest)
            os.close(descriptor)
            held.callback(os.close, high)
            return high

        carried = tuple(keep(each) for each in remake_carried(tree.root.folder, tree.state.carried))
        pipes = [_make_pipe(pipe) for pipe in tree.state.pipes]
        sockets = make_sockets(tree.state.sockets)
        made = _Made(carried, pipes, [one.fileno() for one, _ in sockets])
        files = tuple(keep(_open(file, made)) for file in tree.state.files)
        fill_sockets(tree.state.sockets, sockets, files)
        take_of_files(tree.locks, files)
        for end in itertools.chain(*pipes):
            os.close(end)
        for one, _ in sockets:
            one.close()
        watches: dict[int, list[PollWatch]] = defaultdict(list)
        for watch in itertools.chain.from_iterable(file.watches for file in tree.state.files):
            watches[watch.pid].append(watch)
        locks: dict[int, list[FileLock]] = defaultdict(list)
        for lock in tree.locks:
            locks[lock.pid].append(lock)
        yield OpenedFiles(lowest, files, carried, watches, locks)


def _allow_descriptors(num: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < num:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(num, hard) if hard != resource.RLIM_INFINITY else num, hard))


@dataclass(frozen=True, slots=True)
class _Made:
    """The objects behind open files, as descriptors of this process."""

    carried: Sequence[int]
    pipes: Sequence[tuple[int, int]]  # both ends
    sockets: Sequence[int]


def _open(file: OpenFile, made: _Made) -> int:
    flags = file.flags & ~_AT_OPENING | os.O_CLOEXEC
    if file.kind is FileKind.EVENT:
        descriptor = os.eventfd(0, file.flags & (os.O_NONBLOCK | os.EFD_SEMAPHORE) | os.EFD_CLOEXEC)
        if file.count:
            os.eventfd_write(descriptor, file.count)
        return descriptor
    if file.kind is FileKind.POLL:
        with select.epoll() as poll:
            return os.dup(poll.fileno())
    if file.kind is FileKind.PIPE:
        end = made.pipes[file.target][file.flags & os.O_ACCMODE != os.O_RDONLY]
        return os.open(f"/proc/self/fd/{end}", flags & (os.O_ACCMODE | os.O_NONBLOCK | os.O_CLOEXEC))
    if file.kind is FileKind.SOCKET:
        os.set_blocking(made.sockets[file.target], not file.flags & os.O_NONBLOCK)
        return os.dup(made.sockets[file.target])
    if file.kind is not FileKind.FOLDER:
        flags &= ~os.O_TMPFILE  # which contains O_DIRECTORY
    path = file.path
    if file.kind is FileKind.CARRIED:
        path, flags = f"/proc/self/fd/{made.carried[file.target]}", flags & ~os.O_NOFOLLOW
    descriptor = os.open(path, flags)
    if file.position and file.kind is not FileKind.DEVICE:
        os.lseek(descriptor, file.position, os.SEEK_SET)
    return descriptor


def _make_pipe(pipe: PipeState) -> tuple[int, int]:
    """Make a pipe; returns its reading and its writing end."""
    out, into = os.pipe2(os.O_CLOEXEC)
    fcntl.fcntl(into, _SET_PIPE_BYTES, pipe.capacity)
    if pipe.data:
        os.write(into, pipe.data)
    return out, into
