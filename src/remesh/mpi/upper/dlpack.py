"""The memory of a tensor of another library, such as torch, by DLPack; read without NumPy, which need not be there.

The capsule that a tensor hands out holds a record that says where its elements are. It is looked at and kept, never
*taken*, so its producer frees it when the view is gone. Source: dlpack.h, versions 0 and 1.
"""

from __future__ import annotations

import ctypes
import math
import operator
from typing import Any, Final

from remesh.mpi.upper.addresses import device_memory_at, memory_at
from remesh.mpi.upper.cuda_array import is_contiguous

_CPU: Final = 1
_HOST: Final = (_CPU, 3, 11, 13)
"""Kinds of devices whose memory the processor can read: itself, memory pinned by CUDA or ROCm, managed memory."""
_FLOAT, _COMPLEX = 2, 5
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


def is_of_host(tensor: Any) -> bool:
    """Whether its owner says that the processor can read it."""
    kind, _ = tensor.__dlpack_device__()
    return kind in _HOST


def tensor_view(tensor: Any) -> tuple[memoryview, str | None]:
    """The bytes of a contiguous tensor, and the format of its elements, None for bytes. The view keeps them alive."""
    kind, _ = map(operator.index, tensor.__dlpack_device__())
    # A stream of -1: what runs on the device is for the program to wait for.
    stream = {} if kind == _CPU else {"stream": -1}
    try:
        capsule = tensor.__dlpack__(max_version=(1, 0), copy=False, **stream)
    except TypeError:  # it knows no versions
        capsule = tensor.__dlpack__(**stream)
    told, is_read_only = _look_into(capsule)
    shape = _checked_shape(told)
    form, element_bytes = _element(told)
    num_bytes = math.prod(shape) * element_bytes
    if not num_bytes:
        return memoryview(bytearray()), form
    if told.strides and not is_contiguous(shape, told.strides[: told.num_dims], 1):
        raise BufferError("message: the tensor is not contiguous")
    at = (told.data or 0) + told.byte_offset
    view = memory_at(at, num_bytes, capsule) if kind == _CPU else device_memory_at(at, num_bytes, capsule)
    return (view.toreadonly() if is_read_only else view), form


def _checked_shape(told: _Tensor) -> list[int]:
    if told.num_dims < 0 or (told.num_dims > 0 and not told.shape):
        raise BufferError(f"message: the tensor has {told.num_dims} dims, and no shape")
    shape = told.shape[: told.num_dims] if told.num_dims else []
    if min(shape, default=0) < 0:
        raise BufferError(f"message: the tensor has the shape {shape}")
    return shape


def _element(told: _Tensor) -> tuple[str | None, int]:
    """Format, and bytes, of an element, which may have several lanes: two reals are a complex number, others bytes."""
    # The field has 8 bits: complex numbers of 256 leave 0 in it.
    num_bits = told.bits or 256
    code = told.code
    if told.lanes == 2 and code == _FLOAT:
        code, bits_in_all = _COMPLEX, 2 * num_bits
    else:
        bits_in_all = num_bits * told.lanes
    form = _FORMATS.get((code, bits_in_all)) if told.lanes == 1 or code == _COMPLEX else None
    return form, (bits_in_all + 7) // 8


def _look_into(capsule: Any) -> tuple[_Tensor, bool]:
    """The tensor's record in a capsule, and whether it must not be written to."""
    try:
        name = _get_name(capsule)
    except ValueError as error:
        raise BufferError("message: the tensor hands out no capsule") from error
    if name not in _OFFSETS:
        raise BufferError(f"message: the tensor's capsule is called {name!r}, expected one of {sorted(_OFFSETS)}")
    at = _get_pointer(capsule, name)
    if not _OFFSETS[name]:
        return _Tensor.from_address(at), False
    version = ctypes.c_uint32.from_address(at).value
    if version < 1:
        raise BufferError(f"message: the tensor's capsule is of version {version}, expected 1 or later")
    flags = ctypes.c_uint64.from_address(at + _FLAGS_OFFSET).value
    return _Tensor.from_address(at + _OFFSETS[name]), bool(flags & _READ_ONLY)
