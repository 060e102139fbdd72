"""MPI.buffer: memory by its address, and memory that MPI allocates.

Before Python 3.12 no class written in Python can offer its memory to others, so there the extension does it for ours.
Without either, plain memoryviews take the place of buffers, and ``isinstance(view, MPI.buffer)`` is true for them.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from typing import Any

from remesh.transparent.native import NATIVE
from remesh.transparent.upper.views import byte_view

_CAN_OFFER = NATIVE.Engine is not None or sys.version_info >= (3, 12)


class _LikeMemory(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or (not _CAN_OFFER and isinstance(instance, memoryview))


class buffer(NATIVE.Exporter, metaclass=_LikeMemory):  # type: ignore[misc]  # a class by all means
    """A run of bytes in memory."""

    __slots__ = ("_view", "obj")
    _view: memoryview
    obj: Any
    """Whose memory it is; None if nobody's."""

    def __new__(cls, *buf: Any) -> Any:
        if len(buf) > 1:
            raise TypeError(f"buffer: expecting at most 1 argument, got {len(buf)}")
        return offer(byte_view(buf[0])[0], buf[0]) if buf else offer(nothing(), None)

    def _offered(self) -> memoryview:
        return self._view

    @staticmethod
    def allocate(nbytes: int, clear: bool = False) -> Any:
        """Fresh memory; it is all zeros in any case."""
        memory = bytearray(operator.index(nbytes))
        return offer(memoryview(memory), memory)

    @staticmethod
    def frombuffer(obj: Any, readonly: bool = False) -> Any:
        """The memory of another object."""
        view = byte_view(obj)[0]
        return offer(view.toreadonly() if readonly else view, obj)

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> Any:
        """Memory by its address; nobody keeps it alive."""
        if nbytes < 0:
            raise ValueError("expecting non-negative buffer length")
        if nbytes and not address:
            raise ValueError("expecting non-NULL address")
        view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else nothing()
        return offer(view.toreadonly() if readonly else view, None)

    address = property(lambda self: NATIVE.address_of(self._view))
    nbytes = property(lambda self: self._view.nbytes)
    readonly = property(lambda self: self._view.readonly)
    format = property(lambda self: "B")
    itemsize = property(lambda self: 1)

    def __len__(self) -> int:
        return len(self._view)

    def _at(self, item: Any) -> Any:
        if isinstance(item, slice):
            if item.step not in (None, 1):
                raise IndexError("buffer: slices have no steps")
            return item
        if not hasattr(item, "__index__"):
            raise TypeError(f"buffer: indices are integers or slices, not {type(item).__name__}")
        return item

    def __getitem__(self, item: Any) -> Any:
        part = self._view[self._at(item)]
        return offer(part, self.obj) if isinstance(part, memoryview) else part

    def __setitem__(self, item: Any, value: Any) -> None:
        where = self._at(item)
        if self._view.readonly:
            raise TypeError("buffer: the memory is read-only")
        if not isinstance(where, slice):
            self._view[where] = value
        elif hasattr(value, "__index__"):
            self._view[where] = bytes([value]) * len(self._view[where])
        else:
            given = byte_view(value)[0]
            if len(given) != len(self._view[where]):
                raise ValueError(f"buffer: {len(given)} bytes for a slice of {len(self._view[where])}")
            self._view[where] = given

    def __delitem__(self, item: Any) -> None:
        raise NotImplementedError("buffer: its length is fixed")

    def cast(self, format: str, *shape: Any) -> memoryview:
        """Its memory in another form."""
        return self._view.cast(format, *shape)  # type: ignore[call-overload,no-any-return]  # any format

    def tobytes(self, order: Any = None) -> bytes:
        """A copy."""
        return self._view.tobytes(order)

    def toreadonly(self) -> Any:
        """The same memory, not to be written."""
        return offer(self._view.toreadonly(), self.obj)

    def release(self) -> None:
        """Let go of the memory."""
        self._view, self.obj = nothing(), None


def offer(view: memoryview, whose: Any) -> Any:
    """A buffer on a view; ``whose`` memory it is stays alive with it."""
    if not _CAN_OFFER:
        return view
    made = object.__new__(buffer)
    made._view, made.obj = view, whose
    return made


def nothing() -> memoryview:
    """No bytes, at address 0, as MPI shows them."""
    return memoryview((ctypes.c_char * 0).from_address(0)).cast("B")


def Alloc_mem(size: int, info: Any = None) -> Any:
    """Fresh memory."""
    return buffer.allocate(size)


def Free_mem(mem: Any) -> None:
    """Give memory back."""
    mem.release()
