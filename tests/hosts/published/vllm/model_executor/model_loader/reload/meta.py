"""Memory for layers that vLLM has made empty, as its sources publish it."""

from __future__ import annotations

from typing import Any

import torch


def materialize_layer(layer: torch.nn.Module, info: Any) -> None:
    for name, parameter in layer._parameters.items():
        if parameter is not None and parameter.is_meta:
            setattr(layer, name, torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=False))
