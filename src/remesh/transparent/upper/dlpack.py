"""The memory of a tensor of another library, such as torch, by DLPack; read without NumPy, which need not be there.

The capsule that a tensor hands out holds a record that says where its elements are. It is looked at and kept, never
*taken*, so its producer frees it when the view is gone. Source: dlpack.h, versions 0 and 1.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

_CPU: Final = 1
_OFFSETS: Final = {b"dltensor": 0, b"dltensor_versioned": 32}
"""Name of a capsule, and where in its record the tensor stands: behind version, owner, deleter and flags, or first."""
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
    capsule = tensor.__dlpack__()
    name = _get_name(capsule)
    if name not in _OFFSETS:
        raise BufferError(f"message: the tensor's capsule is called {name!r}, expected one of {sorted(_OFFSETS)}")
    told = _Tensor.from_address(_get_pointer(capsule, name) + _OFFSETS[name])
    form = _FORMATS.get((told.code, told.bits), f"DLPack's kind {told.code} of {told.bits} bits")
    shape = told.shape[: told.num_dims]
    strides = told.strides[: told.num_dims] if told.strides else None
    num_bytes = told.bits * told.lanes // 8
    for extent in shape:
        num_bytes *= extent
    if strides is not None and num_bytes and not _is_contiguous(shape, strides):
        raise BufferError("message: the tensor is not contiguous")
    if not num_bytes:
        return memoryview(bytearray()), form
    raw = (ctypes.c_char * num_bytes).from_address(told.data + told.byte_offset)
    raw._keep = capsule
    return memoryview(raw).cast("B"), form


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
