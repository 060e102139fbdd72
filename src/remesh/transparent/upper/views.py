"""The bytes of any Python buffer."""

from __future__ import annotations

import ctypes
from typing import Any

from remesh.transparent.native import NATIVE
from remesh.transparent.upper.dlpack import tensor_view


def byte_view(buffer: Any) -> tuple[memoryview, str]:
    """The bytes of a contiguous buffer, and its format. The view keeps the buffer alive."""
    if not isinstance(buffer, memoryview):
        try:
            buffer = memoryview(buffer)
        except TypeError:
            if hasattr(buffer, "__dlpack__"):
                return tensor_view(buffer)
            if isinstance(buffer, NATIVE.Exporter):
                return buffer._offered(), "B"
            kind = type(buffer).__name__
            raise TypeError(f"message: expecting a buffer or a tensor on the CPU, got {kind}") from None
    if not buffer.contiguous:
        raise BufferError("message: the buffer is not contiguous")
    if buffer.nbytes == 0:
        return memoryview(bytearray()), buffer.format
    if buffer.c_contiguous:
        return (buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")), buffer.format
    raw = (ctypes.c_char * buffer.nbytes).from_address(NATIVE.address_of(buffer))
    raw._keep = buffer
    return memoryview(raw).cast("B"), buffer.format
