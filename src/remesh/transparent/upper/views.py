"""The bytes of any Python buffer."""

from __future__ import annotations

import ctypes
from typing import Any

from remesh.transparent.native import NATIVE

_DLPACK_CPU = 1


def byte_view(buffer: Any) -> tuple[memoryview, str]:
    """The bytes of a contiguous buffer, and its format. The view keeps the buffer alive."""
    if not isinstance(buffer, memoryview):
        try:
            buffer = memoryview(buffer)
        except TypeError:
            buffer = _tensor_view(buffer)
    if not buffer.contiguous:
        raise BufferError("message: the buffer is not contiguous")
    if buffer.nbytes == 0:
        return memoryview(bytearray()), buffer.format
    if buffer.c_contiguous:
        return (buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")), buffer.format
    raw = (ctypes.c_char * buffer.nbytes).from_address(NATIVE.address_of(buffer))
    raw._keep = buffer
    return memoryview(raw).cast("B"), buffer.format


def _tensor_view(tensor: Any) -> memoryview:
    """The memory of a tensor of another library, such as a torch tensor on the CPU."""
    if not hasattr(tensor, "__dlpack__"):
        raise TypeError(f"message: expecting a buffer or a tensor on the CPU, got {type(tensor).__name__}")
    kind = tensor.__dlpack_device__()[0]
    if kind != _DLPACK_CPU:
        raise BufferError(f"message: the tensor is on a device of kind {kind}; copy it to the CPU first")
    import numpy as np  # noqa: PLC0415 - optional for programs; who has tensors has it

    array: Any = np.from_dlpack(tensor)
    return memoryview(array)
