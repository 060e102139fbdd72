"""Names for flattened tensors as they are stored; how they load under another split is in ``flattened``."""

from __future__ import annotations

from dataclasses import dataclass

from remesh.checkpoint.plan.flattened import stored_form
from remesh.checkpoint.values.entities import ShardedTensor


@dataclass(frozen=True, slots=True)
class TensorReformulationMetadata:
    """Global shapes of a flattened tensor."""

    ckpt_orig_global_shape: tuple[int, ...]
    """Before flattening."""
    ckpt_reform_global_shape: tuple[int, ...]
    """As stored: number of grid cells in each axis, then the elements of a cell."""


def is_nd_flattened_tensor(sh_ten: ShardedTensor) -> bool:
    """Whether it is a slice of a flattened shard."""
    return sh_ten.flattened_range is not None


def nd_flattened_tensor_reformulated_global_shape(sh_ten: ShardedTensor) -> tuple[int, ...]:
    """The global shape in which a flattened slice is stored.

    >>> import torch
    >>> flat = ShardedTensor.from_rank_offsets_flat("w", torch.zeros(2), (2, 3), (1, 0, 2), flattened_range=slice(0, 2))
    >>> nd_flattened_tensor_reformulated_global_shape(flat)
    (1, 2, 6)
    """
    return stored_form(sh_ten).global_shape
