"""What vLLM's layers do with weights behind their load, as its sources publish it."""

from __future__ import annotations

from abc import ABC

import torch


class QuantizeMethodBase(ABC):  # noqa: B024 - as published
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        return
