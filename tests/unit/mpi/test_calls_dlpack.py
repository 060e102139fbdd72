"""Tensors of other libraries lend their memory to messages, also those whose capsules NumPy would take as read-only."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from remesh.mpi.upper.dlpack import _Tensor
from remesh.mpi.upper.views import byte_view


class _Lent:
    """A tensor that is no buffer, and speaks the first version of DLPack."""

    def __init__(self, tensor: Any, **how: Any) -> None:
        self._tensor, self._how = tensor, how

    def __dlpack__(self) -> Any:  # as of the first version, it is asked for none
        return self._tensor.__dlpack__(**self._how)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned: its head is 32 bytes, and the tensor's own record follows."""

    _fields_ = (("version", ctypes.c_uint32 * 2), ("head", ctypes.c_uint64 * 3), ("tensor", _Tensor))


class _Managed:
    """A record made by hand, and handed out."""

    def __init__(
        self, array: Any, *, code: int, bits: int, lanes: int, num: int, device: int = 1, version: int = 1
    ) -> None:
        self._array, self._device, self._shape = array, device, (ctypes.c_int64 * 1)(num)
        self._whole = _Versioned(version=(ctypes.c_uint32 * 2)(version, 0))
        self.record = self._whole.tensor
        self.record.data, self.record.num_dims = array.ctypes.data, 1
        self.record.code, self.record.bits, self.record.lanes = code, bits, lanes
        self.record.shape = ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, **how: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._whole), b"dltensor_versioned", None)


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64])
def test_a_view_has_the_bytes_and_the_format_of_the_tensor_and_writes_to_it(kind: torch.dtype) -> None:
    tensor = torch.arange(6).to(kind).reshape(2, 3)
    view, form = byte_view(_Lent(tensor))
    array = tensor.numpy()
    assert bytes(view) == array.tobytes()
    assert np.dtype(form) == array.dtype
    view[:] = bytes(len(view))
    assert not tensor.any()


def test_a_view_keeps_the_memory_alive() -> None:
    view, _ = byte_view(_Lent(torch.full((1 << 16,), 7, dtype=torch.int64)))
    others = [torch.zeros(1 << 16, dtype=torch.int64) for _ in range(8)]
    assert view.cast("q").tolist() == [7] * (1 << 16) and len(others) == 8


def test_capsules_of_both_versions_are_read_and_a_type_that_mpi_lacks_is_bytes() -> None:
    array = np.arange(3, dtype=np.complex128)
    for lent in (_Lent(array), _Lent(array, max_version=(1, 0))):
        view, form = byte_view(lent)
        assert form == "Zd" and bytes(view) == array.tobytes()
    view, form = byte_view(_Lent(torch.zeros(2, dtype=torch.bfloat16)))
    assert form is None and len(view) == 4


def test_two_lanes_of_reals_are_a_complex_number_and_other_lanes_are_bytes() -> None:
    managed = _Managed(np.arange(3, dtype=np.float64), code=2, bits=64, lanes=2, num=1)
    assert byte_view(managed)[1] == "Zd" and len(byte_view(managed)[0]) == 16
    managed = _Managed(np.arange(4, dtype=np.uint16), code=1, bits=16, lanes=2, num=2)
    assert byte_view(managed)[1] is None and len(byte_view(managed)[0]) == 8


def test_memory_of_a_device_is_taken_only_where_this_process_can_read_it() -> None:
    array = np.arange(3, dtype=np.float64)
    managed = _Managed(array, code=2, bits=64, lanes=1, num=3, device=2)
    assert bytes(byte_view(managed)[0]) == array.tobytes()
    managed.record.data = 4096
    with pytest.raises(BufferError, match="memory of a device"):
        byte_view(managed)


@pytest.mark.parametrize("version", [0, 1])
def test_a_versioned_capsule_must_be_of_a_version_that_exists(version: int) -> None:
    managed = _Managed(np.arange(3), code=0, bits=64, lanes=1, num=3, version=version)
    if version:
        assert len(byte_view(managed)[0]) == 24
    else:
        with pytest.raises(BufferError, match="version 0, expected 1"):
            byte_view(managed)


def test_what_its_owner_protects_is_read_only() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert byte_view(_Lent(array, max_version=(1, 0)))[0].readonly


def test_a_tensor_with_gaps_is_refused_and_one_by_columns_is_not() -> None:
    tensor = torch.arange(12).reshape(3, 4)
    with pytest.raises(BufferError, match="not contiguous"):
        byte_view(_Lent(tensor[:, ::2]))
    assert len(byte_view(_Lent(tensor.t()))[0]) == tensor.nbytes
    assert len(byte_view(_Lent(tensor[:0]))[0]) == 0


def test_what_is_neither_buffer_nor_tensor_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match="got dict"):
        byte_view({})
