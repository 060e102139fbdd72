"""The memory of a tensor of another library, such as torch, by DLPack; read without NumPy, which need not be there.

The capsule that a tensor hands out holds a record that says where its elements are. It is looked at and kept, never
*taken*, so its producer frees it when the view is gone. Source: dlpack.h, versions 0 and 1.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Final

_CPU: Final = 1
_OFFSETS: Final = {b"dltensor": 0, b"dltensor_versioned": 32}
"""Name of a capsule, and where in its record the tensor stands: behind version, owner, deleter and flags, or first."""
_FLAGS_OFFSET: Final = 24
_READ_ONLY: Final = 1
# Codes of DLDataType and numbers of bits, with the letters of struct and of MPI's wider types.
_FORMATS: Final = {
    (0, 8): "b", (0, 16): "h", (0, 32): "i", (0, 64): "q",
    (1, 8): "B", (1, 16): "H", (1, 32): "I", (1, 64): "Q",
    (2, 16): "e", (2, 32): "f", (2, 64): "d", (2, 128): "g",
    (5, 64): "Zf", (5, 128): "Zd", (5, 256): "Zg", (6, 8): "?",
}  # fmt: skip


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_kind", ctypes.c_int32),
        ("device_number", ctypes.c_int32),
        ("num_dims", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.restype, _get_name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def tensor_view(tensor: Any) -> tuple[memoryview, str]:
    """The bytes of a contiguous tensor on the CPU, and the format of its elements. The view keeps them alive."""
    kind = tensor.__dlpack_device__()[0]
    if kind != _CPU:
        raise BufferError(f"message: the tensor is on a device of kind {kind}; copy it to the CPU first")
    try:
        capsule = tensor.__dlpack__(max_version=(1, 0))
    except TypeError:  # it knows no versions
        capsule = tensor.__dlpack__()
    told, is_read_only = _look_into(capsule)
    # The field has 8 bits: complex numbers of 256 leave 0 in it.
    num_bits = told.bits or 256
    form = _FORMATS.get((told.code, num_bits), f"DLPack's kind {told.code} of {num_bits} bits")
    shape = told.shape[: max(told.num_dims, 0)]
    if told.num_dims < 0 or min(shape, default=0) < 0:
        raise BufferError(f"message: the tensor has {told.num_dims} dims, of shape {shape}")
    num_bytes = math.prod(shape) * num_bits * told.lanes // 8
    if not num_bytes:
        return memoryview(bytearray()), form
    if told.strides and not _is_contiguous(shape, told.strides[: told.num_dims]):
        raise BufferError("message: the tensor is not contiguous")
    raw = (ctypes.c_char * num_bytes).from_address(told.data + told.byte_offset)
    raw._keep = capsule
    view = memoryview(raw).cast("B")
    return (view.toreadonly() if is_read_only else view), form


def _look_into(capsule: Any) -> tuple[_Tensor, bool]:
    """The tensor's record in a capsule, and whether it must not be written to."""
    try:
        name = _get_name(capsule)
    except ValueError as error:
        raise BufferError("message: the tensor hands out no capsule") from error
    if name not in _OFFSETS:
        raise BufferError(f"message: the tensor's capsule is called {name!r}, expected one of {sorted(_OFFSETS)}")
    at = _get_pointer(capsule, name)
    flags = ctypes.c_uint64.from_address(at + _FLAGS_OFFSET).value if _OFFSETS[name] else 0
    return _Tensor.from_address(at + _OFFSETS[name]), bool(flags & _READ_ONLY)


def _is_contiguous(shape: list[int], strides: list[int]) -> bool:
    """By rows or by columns; ``strides`` count elements."""
    return any(
        _fits(list(pairs)) for pairs in (zip(shape[::-1], strides[::-1], strict=True), zip(shape, strides, strict=True))
    )


def _fits(pairs: list[tuple[int, int]]) -> bool:
    expected = 1
    for extent, stride in pairs:
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True
