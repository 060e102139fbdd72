"""MPI.buffer: memory by its address, and memory that MPI allocates.

Before Python 3.12 no class written in Python can offer its memory to others, so all these are plain memoryviews;
``isinstance(view, MPI.buffer)`` is true for them.
"""

from __future__ import annotations

import ctypes
from typing import Any

from remesh.transparent.upper.views import byte_view


class _ViewsOfMemory(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, memoryview)


class buffer(metaclass=_ViewsOfMemory):
    """A run of bytes in memory."""

    def __new__(cls, obj: Any) -> Any:
        return byte_view(obj)[0]

    @staticmethod
    def allocate(nbytes: int, clear: bool = False) -> memoryview:
        """Fresh memory."""
        return memoryview(bytearray(nbytes))

    @staticmethod
    def frombuffer(obj: Any, readonly: bool = False) -> memoryview:
        """The memory of another object."""
        view = byte_view(obj)[0]
        return view.toreadonly() if readonly else view

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> memoryview:
        """Memory by its address; nobody keeps it alive."""
        if nbytes < 0:
            raise ValueError("expecting non-negative buffer length")
        if nbytes and not address:
            raise ValueError("expecting non-NULL address")
        view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")
        return view.toreadonly() if readonly else view


for _name in ("cast", "format", "itemsize", "nbytes", "obj", "readonly", "release", "tobytes", "toreadonly"):
    setattr(buffer, _name, getattr(memoryview, _name))


def Alloc_mem(size: int, info: Any = None) -> memoryview:
    """Fresh memory."""
    return buffer.allocate(size)


def Free_mem(mem: memoryview) -> None:
    """Give memory back."""
    mem.release()
