"""Open files of a restored process tree: checked, truncated and opened by our init, for all that inherit them.

A file that the program reads or writes must begin with the bytes it had at the image. If it is longer now, and the
program had it open for writing, the policy decides; the program will write again what came after the image. Bytes
of such a file, or of one that is mapped for writing, may have changed under the policy `REWRITE` only: the program
reads none of them before it writes them.
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
from remesh.carried.images.form.format import FileIdentity
from remesh.carried.images.form.identity import hash_of
from remesh.carried.images.form.image_reader import StoredTree
from remesh.carried.images.form.kinds import OpenFilePolicy
from remesh.carried.images.form.locks import FileLock, take_of_files
from remesh.carried.images.form.tree_format import FileKind, OpenFile, PipeState, PollWatch
from remesh.carried.images.look.sockets import fill_sockets, make_sockets
from remesh.foundation.errors import StorageError

_AT_OPENING: Final = os.O_CREAT | os.O_EXCL | os.O_NOCTTY | os.O_TRUNC
_LAST_OF_OURS: Final = 63
"""The lowest numbers, up to this one, are left to descriptors of this process itself."""
_SPARE_DESCRIPTORS: Final = 64
_SET_PIPE_BYTES: Final = 1031


_MAPPED: Final = os.O_RDWR | os.O_PATH
"""Flags that no open file has: of a file that is mapped for writing."""


def check_open_files(tree: StoredTree, policy: OpenFilePolicy) -> None:
    """Raise `StorageError` unless every file that was open, or mapped for writing, begins with what it held.

    And the policy allows more.
    """
    written = _written_files(tree)
    for file in (*tree.state.files, *written.values()):
        if file.kind in (FileKind.FILE, FileKind.FOLDER, FileKind.DEVICE) and not os.path.exists(file.path):
            raise StorageError(
                f"restoring {tree.root.folder}: the program had {file.path} {_how(file)}, which is "
                "gone; put it back, or restart where it is"
            )
        if file.content is not None and written.get(file.path, file) is file:
            _check_content(tree, file, file.content, policy)


def _written_files(tree: StoredTree) -> dict[str, OpenFile]:
    """The files that processes could write to by their memory, by path, as if each were open once more."""
    found = {path: content for member in tree.members for path, content in member.areas.written_files().items()}
    return {path: OpenFile(FileKind.FILE, _MAPPED, path, 0, content, -1, 0, ()) for path, content in found.items()}


def _how(file: OpenFile) -> str:
    return "mapped for writing" if file.flags == _MAPPED else "open"


def _check_content(tree: StoredTree, file: OpenFile, content: FileIdentity, policy: OpenFilePolicy) -> None:
    info = os.stat(file.path)
    what = f"restoring {tree.root.folder}: {file.path}, which the program had {_how(file)},"
    if info.st_size < content.num_bytes:
        raise StorageError(
            f"{what} is shorter than at the image: expected at least {content.num_bytes} bytes, found {info.st_size}; "
            "put it back as it was"
        )
    unchanged = info.st_size == content.num_bytes and info.st_mtime_ns == content.mtime_ns
    unchanged = unchanged and file.flags != _MAPPED  # writes to memory seldom change the time
    may_change = policy is OpenFilePolicy.REWRITE and is_writable(file)
    if not unchanged and not may_change and hash_of(file.path, content.num_bytes) != content.sha256:
        advice = "; or, if the program only writes it, choose to have it written again" if is_writable(file) else ""
        raise StorageError(
            f"{what} was changed since: its first {content.num_bytes} bytes are not those of the image; "
            f"put it back as it was{advice}"
        )
    if info.st_size > content.num_bytes and is_writable(file) and policy is OpenFilePolicy.REFUSE:
        raise StorageError(
            f"{what} has grown since the image: expected {content.num_bytes} bytes, found {info.st_size}; choose to "
            "truncate or to keep what was written since"
        )


def cut_open_files(tree: StoredTree, policy: OpenFilePolicy) -> None:
    """Cut the files that were open for writing to the length they had, if that is the policy."""
    if policy is not OpenFilePolicy.TRUNCATE:
        return
    for file in tree.state.files:
        content = file.content
        if content is not None and is_writable(file) and os.stat(file.path).st_size > content.num_bytes:
            os.truncate(file.path, content.num_bytes)


def is_writable(file: OpenFile) -> bool:
    """Whether the program may write to the file."""
    return file.flags & os.O_ACCMODE != os.O_RDONLY


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
