"""Memory that both halves of a rank have under the same addresses: where a program's large blocks can stand.

The lower half makes a file, without any pages at first; both halves map it at :data:`ADDRESS`, the same on every
machine, so that an image comes back to it. What stands there is handed to MPI as it is, without a copy. In the
program ``library/arena/arena.c`` divides it among large blocks, in the place of malloc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Final

from remesh.carried.mpi.calls.words import ARENA_START
from remesh.carried.mpi.native import NATIVE

ADDRESS: Final = ARENA_START
SIZE_BYTES: Final = 1 << 36
"""Length of the address range in bytes; pages are made when arrays use them."""
FILE: Final = "arena"
"""Name of the file beside the channel."""


class Arena:
    """The lower half's mapping of the arena."""

    def __init__(self, path: str) -> None:
        """Make the file and map it; `OSError` where this machine does not allow that."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, SIZE_BYTES)
        finally:
            os.close(descriptor)
        NATIVE.map_at(path, ADDRESS, SIZE_BYTES)
        self._whole = memoryview((ctypes.c_char * SIZE_BYTES).from_address(ADDRESS)).cast("B")

    def view(self, address: int, num_bytes: int) -> memoryview | None:
        """The program's bytes at an address, in place; None where they do not stand here."""
        start = address - ADDRESS
        if start < 0 or num_bytes < 0 or start + num_bytes > SIZE_BYTES:
            return None
        return self._whole[start : start + num_bytes]


def make_arena(path: str) -> Arena | None:
    """Make an arena; None if files may not be that long here."""
    try:
        return Arena(path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return None
