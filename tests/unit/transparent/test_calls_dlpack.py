"""Tensors of other libraries lend their memory to messages, also those whose capsules NumPy would take as read-only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from remesh.transparent.upper.views import byte_view


class _Lent:
    """A tensor that is no buffer, and speaks the first version of DLPack."""

    def __init__(self, tensor: Any, **how: Any) -> None:
        self._tensor, self._how = tensor, how

    def __dlpack__(self) -> Any:  # as of the first version, it is asked for none
        return self._tensor.__dlpack__(**self._how)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


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


def test_capsules_of_both_versions_are_read_and_a_type_that_mpi_lacks_is_told() -> None:
    array = np.arange(3, dtype=np.complex128)
    for lent in (_Lent(array), _Lent(array, max_version=(1, 0))):
        view, form = byte_view(lent)
        assert form == "Zd" and bytes(view) == array.tobytes()
    assert byte_view(_Lent(torch.zeros(2, dtype=torch.bfloat16)))[1] == "DLPack's kind 4 of 16 bits"


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
