"""References of parameters to their layers, as vLLM's sources publish them: none is taken away here."""

from __future__ import annotations

import torch


def restore_layer_refs(tensor: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    return tensor
