"""The memory of an array that speaks the CUDA array interface, as far as this process can read it.

Source: Numba's documentation, "CUDA Array Interface", versions 0 to 3.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any, Final

from remesh.mpi.upper.addresses import device_memory_at

_NATIVE_ORDERS, _FOREIGN_ORDER = ("<|", ">") if sys.byteorder == "little" else (">|", "<")
# Kind and bytes of an element, with the letters of struct and of MPI's wider types.
_FORMATS: Final = {
    "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d", "f16": "g", "c8": "Zf", "c16": "Zd", "c32": "Zg",
}  # fmt: skip


def array_view(array: Any) -> tuple[memoryview, str | None]:
    """The bytes of a contiguous array, and the format of its elements, None for bytes. The view keeps it alive."""
    told = array.__cuda_array_interface__
    if not isinstance(told, dict):
        raise TypeError(f"message: expecting a dict as __cuda_array_interface__, got {type(told).__name__}")
    (address, is_read_only), typestr, shape = told["data"], told["typestr"], told["shape"]
    if not isinstance(typestr, str) or not isinstance(shape, tuple):
        raise TypeError("message: expecting a str as typestr and a tuple as shape of __cuda_array_interface__")
    item_bytes = int(typestr[2:])
    num_bytes = math.prod(shape) * item_bytes
    if told.get("mask") is not None:
        raise BufferError("message: masked arrays cannot be sent")
    if num_bytes < 0:
        raise BufferError(f"message: an array of shape {shape}")
    strides = told.get("strides")
    if strides is not None and not is_contiguous(shape, strides, item_bytes):
        raise BufferError(f"message: the array of shape {shape} with strides {strides} is not contiguous")
    if told.get("descr") not in (None, [("", typestr)]):
        _check_fields(told["descr"])
    view = device_memory_at(address or 0, num_bytes, array)
    form = _FORMATS.get(typestr[1:])
    if form is not None and typestr[0] not in _NATIVE_ORDERS:
        form = _FOREIGN_ORDER + form
    return (view.toreadonly() if is_read_only else view), form


def _check_fields(descr: Any) -> None:
    if not isinstance(descr, list):
        raise TypeError(f"message: expecting a list as descr of __cuda_array_interface__, got {type(descr).__name__}")
    warnings.warn("__cuda_array_interface__: ignoring 'descr' key", RuntimeWarning, stacklevel=2)


def is_contiguous(shape: Any, strides: Any, unit: int) -> bool:
    """Whether elements ``unit`` apart stand one after another, by rows or by columns."""
    pairs = list(zip(shape, strides, strict=True))
    return _is_run(pairs[::-1], unit) or _is_run(pairs, unit)


def _is_run(pairs: list[tuple[int, int]], expected: int) -> bool:
    for extent, stride in pairs:
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True
