"""Tensors that are saved from the first rank alone: whole buffers that differ between ranks.

DDP keeps parameters equal, and lets the ranks' buffers differ from each backward to the next forward, which begins with
those of the first rank. A save shares the writing of whole tensors among the ranks, so that means and variances of one
layer would come from different ones. Here no other rank holds a tensor of the first rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from remesh.checkpoint.values.nests import dict_list_map_outplace
from remesh.comm.gather import group_rank
from remesh.layout.from_torch import Piece


def buffer_names(model: nn.Module, weights: Mapping[str, Any]) -> set[str]:
    """Which of the weights are whole buffers of the model; ``weights`` as torch's ``get_model_state_dict`` gives them.

    They go by their memory, for names in a state dict lack what wrappers add.
    """
    held = {buffer.data_ptr() for buffer in model.buffers() if not isinstance(buffer, DTensor)}
    return {name for name, one in weights.items() if _is_whole(one) and one.data_ptr() in held}


def with_first_buffers(weights: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The weights to be saved, with the named ones as the first rank has them."""
    return {name: of_first_rank(one) if name in names else one for name, one in weights.items()}


def of_first_rank(state: Any) -> Any:
    """A tensor or a nest to be saved, with each whole tensor as the first rank has it; DTensors stay themselves."""
    return dict_list_map_outplace(_of_first_rank, state)


def _of_first_rank(leaf: Any) -> Any:
    return Piece(leaf.detach(), tuple(leaf.shape), ()) if group_rank() and _is_whole(leaf) else leaf


def _is_whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
