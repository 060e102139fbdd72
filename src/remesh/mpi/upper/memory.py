"""MPI.buffer: a run of bytes of another object, of MPI's, or known by its address."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from remesh.mpi.native import NATIVE
from remesh.mpi.upper.addresses import memory_at
from remesh.mpi.upper.views import byte_view, is_on_device


class buffer(NATIVE.Exporter):  # type: ignore[misc]  # of the extension
    """A run of bytes in memory."""

    __slots__ = ("__weakref__", "_on_device", "_owner", "_view")
    _view: memoryview | None  # None: released, or never of anything
    _owner: Any  # whose memory it is; None if nobody's
    _on_device: bool  # its bytes are not for the processor

    def __new__(cls, *obj: Any) -> buffer:
        return cls._lent(*obj) if obj else cls._of(None, None)

    @classmethod
    def _of(cls, view: memoryview | None, owner: Any, *, on_device: bool = False) -> buffer:
        self: buffer = object.__new__(cls)
        self._view, self._owner, self._on_device = view, owner, on_device
        return self

    @classmethod
    def _lent(cls, obj: Any) -> buffer:
        return cls._of(byte_view(obj)[0], obj, on_device=is_on_device(obj))

    @staticmethod
    def allocate(nbytes: int, clear: bool = False) -> buffer:
        """Fresh memory."""
        if operator.index(nbytes) < 0:
            raise ValueError(f"expecting non-negative size, got {nbytes}")
        memory = bytearray(nbytes)
        return buffer._of(memoryview(memory), memory)

    @staticmethod
    def frombuffer(obj: Any, readonly: bool = False) -> buffer:
        """The memory of another object."""
        lent = buffer._lent(obj)
        if readonly:
            return lent.toreadonly()
        if lent.readonly:
            raise BufferError("the object is not writable")
        return lent

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> buffer:
        """Memory by its address; nobody keeps it alive."""
        if nbytes < 0:
            raise ValueError(f"expecting non-negative buffer length, got {nbytes}")
        if nbytes and not address:
            raise ValueError("expecting non-NULL address")
        view = memory_at(address, nbytes)
        return buffer._of(view.toreadonly() if readonly else view, None)

    @property
    def address(self) -> int:
        """Where it begins."""
        return 0 if self._view is None else int(NATIVE.address_of(self._view))

    @property
    def obj(self) -> Any:
        """The object whose memory it is."""
        return self._owner

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return len(self)

    @property
    def readonly(self) -> bool:
        """Whether it must not be written to."""
        return self._view is not None and self._view.readonly

    format = property(lambda self: "B", doc="Format of an element.")
    itemsize = property(lambda self: 1, doc="Bytes of an element.")

    def cast(self, format: str, shape: Sequence[int] | None = None) -> memoryview:
        """The same memory as a memoryview of another format and shape."""
        view: Any = self._for_processor()
        cast: memoryview = view.cast(format) if shape is None else view.cast(format, shape)
        return cast

    def tobytes(self, order: str | None = None) -> bytes:
        """A copy of the bytes."""
        return bytes(self._for_processor())

    def toreadonly(self) -> buffer:
        """The same memory, not to be written to."""
        return self._of(self.__buffer__(0).toreadonly(), self._owner, on_device=self._on_device)

    def release(self) -> None:
        """Let the memory go."""
        self._view, self._owner, self._on_device = None, None, False

    def __buffer__(self, flags: int) -> memoryview:
        return memoryview(bytearray()) if self._view is None else self._view

    def _for_processor(self) -> memoryview:
        if self._on_device:
            raise BufferError("the buffer is the memory of a device; copy it to the host first")
        return self.__buffer__(0)

    # A sequence of bytes.

    def __len__(self) -> int:
        return 0 if self._view is None else len(self._view)

    def _place(self, item: Any) -> int | slice:
        if isinstance(item, slice):
            start, stop, step = item.indices(len(self))
            if step != 1:
                raise IndexError("slice with step not supported")
            return slice(start, max(start, stop))
        try:
            at = operator.index(item)
        except TypeError:
            raise TypeError("index must be integer or slice") from None
        if not -len(self) <= at < len(self):
            raise IndexError(f"index {at} of a buffer of {len(self)} bytes")
        return at

    def __getitem__(self, item: Any) -> Any:
        view, place = self._for_processor(), self._place(item)
        return view[place] if isinstance(place, int) else self._of(view[place], self)

    def __setitem__(self, item: Any, value: Any) -> None:
        view, place = self._for_processor(), self._place(item)
        if self.readonly:
            raise TypeError("the buffer is read-only")
        if isinstance(place, int):
            view[place] = value
            return
        length = place.stop - place.start
        data = bytes([value]) * length if hasattr(value, "__index__") else byte_view(value)[0]
        if len(data) != length:
            raise ValueError(f"slice of {length} bytes does not match a buffer of {len(data)}")
        view[place] = data

    def __delitem__(self, item: Any) -> None:
        raise NotImplementedError("bytes of a buffer cannot be deleted")


def attached(buf: Any) -> Any:
    """What a program gives for buffered sends, as it gets it back."""
    return buf if isinstance(buf, (buffer, int)) and not getattr(buf, "readonly", False) else buffer.frombuffer(buf)


def Alloc_mem(size: int, info: Any = None) -> buffer:
    """Fresh memory."""
    return buffer.allocate(size)


def Free_mem(mem: buffer) -> None:
    """Give memory back."""
    mem.release()
