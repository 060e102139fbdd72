"""How are open files brought back? Checked and cut first, by our init; then opened again inside the process.

A file that the program reads or writes must begin with the bytes it had at the image. If it is longer now, and the
program had it open for writing, the policy decides; the program will write again what came after the image. Bytes
of such a file may have changed under the policy `REWRITE` only: the program reads none of them before it writes them.
"""

from __future__ import annotations

import os
from typing import Final

from remesh.errors import StorageError
from remesh.images.format import FileIdentity, FileKind, FilesState, FileState
from remesh.images.identity import hash_of
from remesh.images.kinds import OpenFilePolicy
from remesh.images.nameless import remade
from remesh.images.ptrace import Tracee
from remesh.images.stored import StoredImage
from remesh.linux.calls import PAGE_BYTES

SCRATCH_BYTES: Final = 16 * PAGE_BYTES
"""Length of the scratch memory of a restore; the first page holds the instruction, the rest is for data."""
_DATA_BYTES: Final = SCRATCH_BYTES - PAGE_BYTES
_AT_FDCWD: Final = -100
_AT_OPENING: Final = os.O_CREAT | os.O_EXCL | os.O_NOCTTY | os.O_TRUNC
_F_DUPFD_CLOEXEC: Final = 1030
_F_SETFL: Final = 4
_MAX_COUNT: Final = (1 << 32) - 1


def check_open_files(image: StoredImage, policy: OpenFilePolicy) -> None:
    """Raise `StorageError` unless every file that was open begins with what it held, and the policy allows more."""
    for file in image.files.files:
        if file.kind in (FileKind.FILE, FileKind.FOLDER, FileKind.DEVICE) and not os.path.exists(file.path):
            raise StorageError(
                f"restoring {image.folder}: the program had {file.path} open (descriptor {file.number}), which is "
                "gone; put it back, or restart where it is"
            )
        if file.content is not None:
            _check_content(image, file, file.content, policy)


def _check_content(image: StoredImage, file: FileState, content: FileIdentity, policy: OpenFilePolicy) -> None:
    info = os.stat(file.path)
    what = f"restoring {image.folder}: {file.path}, which the program had open (descriptor {file.number}),"
    if info.st_size < content.num_bytes:
        raise StorageError(
            f"{what} is shorter than at the image: expected at least {content.num_bytes} bytes, found {info.st_size}; "
            "put it back as it was"
        )
    unchanged = info.st_size == content.num_bytes and info.st_mtime_ns == content.mtime_ns
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


def cut_open_files(image: StoredImage, policy: OpenFilePolicy) -> None:
    """Give the files that were open for writing the length they had, if that is the policy."""
    if policy is not OpenFilePolicy.TRUNCATE:
        return
    for file in image.files.files:
        content = file.content
        if content is not None and is_writable(file) and os.stat(file.path).st_size > content.num_bytes:
            os.truncate(file.path, content.num_bytes)


def is_writable(file: FileState) -> bool:
    """Whether the program may write by this descriptor."""
    return file.flags & os.O_ACCMODE != os.O_RDONLY


def reopen(image: StoredImage, leader: Tracee, scratch: int) -> None:
    """Open every file in the process of ``leader``, under its number, at its position. It has none open before."""
    with remade(image.folder, image.files) as nameless:
        _reopen(image.files, nameless, leader, scratch)


def _reopen(files: FilesState, nameless: list[str], leader: Tracee, scratch: int) -> None:
    pipes = _make_pipes(files, leader, scratch)
    for file in files.files:
        cloexec = file.flags & os.O_CLOEXEC
        if file.same_as is not None:
            leader.call("dup3", file.same_as, file.number, cloexec)
        elif file.kind is FileKind.PIPE:
            leader.call("dup3", pipes[file.pipe, is_writable(file)], file.number, cloexec)
            leader.call("fcntl", file.number, _F_SETFL, file.flags & os.O_NONBLOCK)
        else:
            path = file.path if file.nameless is None else nameless[file.nameless]
            opened = _make_event(file, leader) if file.kind is FileKind.EVENT else _open(path, file, leader, scratch)
            if opened != file.number:
                leader.call("dup3", opened, file.number, cloexec)
                leader.call("close", opened)
    for descriptor in pipes.values():
        leader.call("close", descriptor)


def _open(path: str, file: FileState, leader: Tracee, scratch: int) -> int:
    leader.write(scratch + PAGE_BYTES, os.fsencode(path) + b"\0")
    flags = file.flags & ~_AT_OPENING
    if file.kind is not FileKind.FOLDER:
        flags &= ~os.O_TMPFILE  # which contains O_DIRECTORY
    opened = leader.call("openat", _AT_FDCWD, scratch + PAGE_BYTES, flags, 0)
    if file.position and file.kind is not FileKind.DEVICE:
        leader.call("lseek", opened, file.position, os.SEEK_SET)
    return opened


def _make_event(file: FileState, leader: Tracee) -> int:
    count = min(int.from_bytes(file.data, "little"), _MAX_COUNT)
    return leader.call("eventfd2", count, file.flags & (os.O_NONBLOCK | os.O_CLOEXEC) | file.position)


def _make_pipes(files: FilesState, leader: Tracee, scratch: int) -> dict[tuple[int, bool], int]:
    """Both ends of every pipe, filled, above all numbers in use; by (number of the pipe, is for writing)."""
    ends: dict[tuple[int, bool], int] = {}
    above = max((file.number for file in files.files), default=0) + 1
    for pipe in sorted({file.pipe for file in files.files if file.kind is FileKind.PIPE}):
        leader.call("pipe2", scratch + PAGE_BYTES, 0)
        pair = leader.read(scratch + PAGE_BYTES, 8)
        for writing, low in ((False, int.from_bytes(pair[:4], "little")), (True, int.from_bytes(pair[4:], "little"))):
            ends[pipe, writing] = leader.call("fcntl", low, _F_DUPFD_CLOEXEC, above)
            leader.call("close", low)
        data = next((file.data for file in files.files if file.pipe == pipe and file.data), b"")
        for start in range(0, len(data), _DATA_BYTES):
            part = data[start : start + _DATA_BYTES]
            leader.write(scratch + PAGE_BYTES, part)
            leader.call("write", ends[pipe, True], scratch + PAGE_BYTES, len(part))
    return ends
