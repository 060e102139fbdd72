"""Temporary folder of this process for as long as it lives, and cleanup of those whose process was killed.

A killed agent removes nothing. So each holds a lock on a file in its folder, which the kernel lets go however it dies;
the next process that makes a folder removes those beside it that no process locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "remesh-"
_NEW_PREFIX = ".remesh-new-"
_LOCK = "lock"


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A new folder for temporary files, removed at the end."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    new = Path(tempfile.mkdtemp(prefix=_NEW_PREFIX))
    with (new / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Only now it has a name that others look for.
        folder = new.rename(new.with_name(PREFIX + new.name.removeprefix(_NEW_PREFIX)))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(root: Path) -> None:
    for lock in root.glob(f"{PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            if lock.lstat().st_uid != os.getuid() or lock.parent.is_symlink():
                continue
            with lock.open("r") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
