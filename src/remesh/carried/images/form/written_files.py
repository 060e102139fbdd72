"""Check and cut of the files that processes write to, before any of them is back.

Such a file must begin with the bytes that it had at the cut. If it is longer now, and the program had it open for
writing, the policy decides: the program will write again what came after the cut. Bytes that it had may have changed
under the policy `REWRITE` only: the program reads none of them before it writes them.

Of a long file samples are compared (`identity`). One that has grown may be taken by them; one of the same length and
another time was written in place, and is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

from remesh.carried.images.form.format import FileIdentity
from remesh.carried.images.form.identity import WHOLE_BYTES, hash_of
from remesh.carried.images.form.kinds import OpenFilePolicy, WrittenFile
from remesh.carried.images.form.tree_format import OpenFile
from remesh.foundation.errors import StorageError


def find_written(files: Iterable[OpenFile], mapped: Mapping[str, FileIdentity]) -> list[WrittenFile]:
    """The files that are open for writing, or mapped so, each once; ``mapped`` by path."""
    opened = {file.path: file.content for file in files if file.content is not None and _is_writable(file)}
    contents = {**opened, **mapped}
    return [
        WrittenFile(path, path in opened, path in mapped, each.num_bytes, each.mtime_ns, each.sha256)
        for path, each in contents.items()
    ]


def find_place(file: WrittenFile, seen_at: str, seen_ns: int) -> WrittenFile:
    """The file with its place and this time; ``seen_at`` is a path by which this process reaches it."""
    system, inode = os.statvfs(seen_at).f_fsid, os.stat(seen_at).st_ino
    return replace(file, place=f"{system or file.path}:{inode}", seen_ns=seen_ns)


def _is_writable(file: OpenFile) -> bool:
    return file.flags & os.O_ACCMODE != os.O_RDONLY


def check_written(files: Iterable[WrittenFile], policy: OpenFilePolicy, doing: str) -> list[str]:
    """Raise `StorageError` unless all files are as they were, or the policy allows more; nothing is changed.

    Returns the files of which only samples were compared, though their time is another.
    """
    return [file.path for file in files if _check_one(file, policy, doing)]


def _check_one(file: WrittenFile, policy: OpenFilePolicy, doing: str) -> bool:
    how = "mapped for writing" if file.is_mapped else "open"
    info, what = _stat(file.path, how, doing), f"{doing}: {file.path}, which the program had {how},"
    _check_length(info, file.num_bytes, what)
    if info.st_size > file.num_bytes and policy is OpenFilePolicy.REFUSE:
        raise StorageError(
            f"{what} has grown since the image: expected {file.num_bytes} bytes, found {info.st_size}; choose to "
            "truncate or to keep what was written since"
        )
    has_same_time = info.st_size == file.num_bytes and info.st_mtime_ns == file.mtime_ns
    if policy is OpenFilePolicy.REWRITE or (has_same_time and not file.is_mapped):
        return False
    is_sampled = file.num_bytes > WHOLE_BYTES
    if hash_of(file.path, file.num_bytes) != file.sha256:
        raise StorageError(
            f"{what} was changed since: its first {file.num_bytes} bytes are not those of the image; put it back "
            "as it was; or, if the program only writes it, choose to have it written again"
        )
    if is_sampled and not has_same_time and info.st_size == file.num_bytes:
        raise StorageError(
            f"{what} was written since, or copied: it has its length of {file.num_bytes} bytes, and another time, "
            "and is too long to compare all of it; put it back with its time (cp --preserve); or, if the program "
            "only writes it, choose to have it written again"
        )
    return is_sampled and not has_same_time


def check_read(file: OpenFile, doing: str) -> bool:
    """Raise `StorageError` unless an open file is there, and, if the program only reads it, is as it was.

    Returns whether only samples were compared, though its time is another.
    """
    info, content = _stat(file.path, "open", doing), file.content
    if content is None or _is_writable(file):
        return False
    what = f"{doing}: {file.path}, which the program had open,"
    _check_length(info, content.num_bytes, what)
    if info.st_size == content.num_bytes and info.st_mtime_ns == content.mtime_ns:
        return False
    if hash_of(file.path, content.num_bytes) != content.sha256:
        raise StorageError(
            f"{what} was changed since: its first {content.num_bytes} bytes are not those of the image; put it back "
            "as it was"
        )
    return content.num_bytes > WHOLE_BYTES


def _check_length(info: os.stat_result, num_bytes: int, what: str) -> None:
    if info.st_size < num_bytes:
        raise StorageError(
            f"{what} is shorter than at the image: expected at least {num_bytes} bytes, found {info.st_size}; "
            "put it back as it was"
        )


def _stat(path: str, how: str, doing: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise StorageError(
            f"{doing}: the program had {path} {how}, which is gone ({error.strerror}); put it back, or restart where "
            "it is"
        ) from error


def cut_written(files: Iterable[WrittenFile], policy: OpenFilePolicy) -> None:
    """Cut the files that were open for writing to the length that they had, if that is the policy."""
    for file in files if policy is OpenFilePolicy.TRUNCATE else ():
        if file.is_open and os.stat(file.path).st_size > file.num_bytes:
            os.truncate(file.path, file.num_bytes)


def tell_sampled(paths: Iterable[str]) -> str:
    """A note for the user on files of which only samples were compared; "" if there are none."""
    named = sorted(set(paths))
    return f"of {', '.join(named)} only samples were compared with the image" if named else ""
