"""Views of memory that is known by its address alone."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

from remesh.mpi.native import NATIVE


def memory_at(address: int, num_bytes: int, keep: Any = None) -> memoryview:
    """A writable view of so many bytes, which keeps ``keep`` alive; nobody else keeps them."""
    if not num_bytes:
        return memoryview(bytearray())
    raw = (ctypes.c_char * num_bytes).from_address(address)
    raw._keep = keep  # type: ignore[attr-defined]  # instances take any attribute
    return memoryview(raw).cast("B")


def device_memory_at(address: int, num_bytes: int, keep: Any) -> memoryview:
    """The same of memory that a device may own: pinned and managed memory is the host's as well, the rest is not.

    The kernel is asked to copy the first and the last byte. What it can read for us the lower half can read too.

    Raises:
        BufferError: this process cannot read it.
    """
    byte = ctypes.c_char()
    for at in {address, address + num_bytes - 1} if num_bytes else ():
        try:
            NATIVE.read_memory(os.getpid(), at, ctypes.addressof(byte), 1)
        except OSError as error:
            if error.errno == errno.EFAULT:
                raise BufferError(
                    f"message: {num_bytes} bytes at {address:#x} are the memory of a device, expected memory that this"
                    " process can read; copy them to the host first"
                ) from error
            raise
    return memory_at(address, num_bytes, keep)
