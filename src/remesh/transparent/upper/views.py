"""The bytes of any Python buffer."""

from __future__ import annotations

import ctypes
from typing import Any

from remesh.transparent.native import NATIVE


def byte_view(buffer: Any) -> tuple[memoryview, str]:
    """The bytes of a contiguous buffer, and its format. The view keeps the buffer alive."""
    if not isinstance(buffer, memoryview):
        if hasattr(buffer, "__array_interface__") and not _speaks_buffer(buffer):
            raise TypeError(f"message: cannot take the memory of {type(buffer).__name__}")
        buffer = memoryview(buffer)
    if not buffer.contiguous:
        raise BufferError("message: the buffer is not contiguous")
    if buffer.nbytes == 0:
        return memoryview(bytearray()), buffer.format
    if buffer.c_contiguous:
        return (buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")), buffer.format
    raw = (ctypes.c_char * buffer.nbytes).from_address(NATIVE.address_of(buffer))
    raw._keep = buffer  # type: ignore[attr-defined]  # ctypes objects take attributes
    return memoryview(raw).cast("B"), buffer.format


def _speaks_buffer(buffer: Any) -> bool:
    try:
        memoryview(buffer)
    except (TypeError, ValueError, BufferError):
        return False
    return True
