"""Which layers vLLM processes behind all others, as its sources publish it: none here."""

from __future__ import annotations

import torch


def is_deferred_attention_layer(layer: torch.nn.Module) -> bool:
    return False
