"""What memory does a tensor stand on: may it be read, may it be filled, and which bytes are its elements?"""

from __future__ import annotations

import torch

from remesh.checkpoint.errors import CheckpointMismatchError
from remesh.layout import has_own_places


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor in one row, sharing its memory.

    A dim of one element may have any stride and the tensor be contiguous for it; a view of bytes wants a stride of 1.

    >>> bytes_of(torch.zeros(8, dtype=torch.int16).as_strided((1,), (3,)))
    tensor([0, 0], dtype=torch.uint8)
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def check_has_values(tensor: torch.Tensor, key: str) -> None:
    """Raise `CheckpointMismatchError` for a tensor that has no elements in memory, or not one after another."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        found = "on the device meta, without values" if tensor.is_meta else f"of layout {tensor.layout}"
        raise CheckpointMismatchError(
            f"looking at tensor {key!r}: it is {found}, expected a dense tensor with memory; give it a device with "
            "to_empty(), or make it dense with to_dense()"
        )


def check_can_fill(tensor: torch.Tensor, key: str) -> None:
    """The same, and that every element has a place of its own, so that values read into it stay there."""
    check_has_values(tensor, key)
    if not tensor.is_contiguous() and not has_own_places(tensor.shape, tensor.stride()):
        raise CheckpointMismatchError(
            f"filling tensor {key!r}: its elements share places in memory (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}), expected a place for each; load into a clone() or contiguous() tensor"
        )
