"""Durable files: written under another name, flushed, then renamed; whole or absent after a crash.

Bytes are on the disk when ``fsync`` of their file returns, a name is when ``fsync`` of its folder does, and a name goes
from one file to another in one moment by ``rename``. What is new is made exclusively: two writers never share a file.
All functions raise `OSError`; the caller knows what it means.
"""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Path, content: bytes | memoryview, mode: int = 0o600) -> None:
    """Make a file with this content, flushed; its name is as durable as its folder is flushed.

    Raises `FileExistsError` where there is one; what is left of a file that could not be written has no use.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb", buffering=0) as file:
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())


def replace_whole(path: Path, content: bytes | memoryview, mode: int = 0o600) -> None:
    """Let a file have this content: readers see the old one or the new one, and after this the new one for good."""
    fresh = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        write_new(fresh, content, mode)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    flush(path.parent)
