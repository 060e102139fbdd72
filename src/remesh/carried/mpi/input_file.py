"""Standard input of a job: the file that its user has redirected, for rank 0 alone."""

from __future__ import annotations

import os
import stat

from remesh.foundation.errors import ConfigError


def find_input(descriptor: int = 0) -> tuple[str, int]:
    """Return the path of the regular file behind a descriptor, and how far it has been read; "" for anything else.

    A file can be opened again on the host of rank 0, and by every restart. No process there could read a terminal
    or a pipe. Raises `ConfigError` for a file without a name.
    """
    try:
        info = os.fstat(descriptor)
    except OSError:  # it is closed
        return "", 0
    if not stat.S_ISREG(info.st_mode):
        return "", 0
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    try:
        named = os.stat(path)
    except OSError:
        named = None
    if named is None or not os.path.samestat(named, info):
        raise ConfigError(
            f"starting a job: its standard input, {path}, is a file without a name (as from a here-document of the "
            "shell); write it to a file that all hosts can read, and redirect from that"
        )
    return path, os.lseek(descriptor, 0, os.SEEK_CUR)
