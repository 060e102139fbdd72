"""The bytes of whatever lends memory: Python's buffers, tensors, arrays of devices."""

from __future__ import annotations

from typing import Any

from remesh.mpi.native import NATIVE
from remesh.mpi.upper.addresses import memory_at
from remesh.mpi.upper.cuda_array import array_view
from remesh.mpi.upper.dlpack import is_of_host, tensor_view


def byte_view(buffer: Any) -> tuple[memoryview, str | None]:
    """The bytes of a contiguous buffer, and its format, None for bytes. The view keeps the buffer alive."""
    if not isinstance(buffer, memoryview):
        try:
            buffer = memoryview(buffer)
        except TypeError:
            return _lent_view(buffer)
    if not buffer.contiguous:
        raise BufferError("message: the buffer is not contiguous")
    if buffer.nbytes == 0:
        return memoryview(bytearray()), buffer.format
    if buffer.c_contiguous:
        return (buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")), buffer.format
    return memory_at(NATIVE.address_of(buffer), buffer.nbytes, buffer), buffer.format


def _lent_view(owner: Any) -> tuple[memoryview, str | None]:
    """The same of what is no buffer by itself."""
    if hasattr(owner, "__dlpack__"):
        return tensor_view(owner)
    if hasattr(owner, "__cuda_array_interface__"):
        return array_view(owner)
    if hasattr(owner, "__buffer__"):  # a buffer from Python 3.12 on
        return byte_view(owner.__buffer__(0))
    raise TypeError(f"message: expecting a buffer or a tensor, got {type(owner).__name__}")


def is_on_device(owner: Any) -> bool:
    """Whether its owner says that a device has the memory, although this process may be able to read it."""
    if hasattr(owner, "__dlpack_device__"):
        return not is_of_host(owner)
    return hasattr(owner, "__cuda_array_interface__")
