"""How vLLM loads a layer once more, as its sources publish it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch


@dataclass
class LayerReloadingInfo:
    restore_metadata: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = field(default_factory=lambda: ({}, {}))
    load_numel: int = 0
    load_numel_total: int | None = None
    kernel_tensors: dict[str, torch.Tensor] | None = None

    def can_load(self) -> bool:
        return self.load_numel_total is not None


LAYERWISE_INFO: WeakKeyDictionary[torch.nn.Module, LayerReloadingInfo] = WeakKeyDictionary()


def get_layerwise_info(layer: torch.nn.Module) -> LayerReloadingInfo:
    return LAYERWISE_INFO.setdefault(layer, LayerReloadingInfo())


def record_metadata_for_reloading(model: torch.nn.Module) -> None:
    for layer in model.modules():
        held = {name: one for name, one in layer._parameters.items() if one is not None}
        metas = {name: torch.nn.Parameter(one.data.to("meta"), requires_grad=False) for name, one in held.items()}
        get_layerwise_info(layer).restore_metadata = (metas, {})


def initialize_layerwise_reload(model: torch.nn.Module) -> None:
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.kernel_tensors = dict(layer._parameters)
        layer._parameters.update(info.restore_metadata[0])
        info.load_numel, info.load_numel_total = 0, sum(one.numel() for one in info.restore_metadata[0].values())


def finalize_layerwise_reload(model: torch.nn.Module, model_config: Any) -> None:
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.load_numel > 0:
            layer.quant_method.process_weights_after_loading(layer)
            for name, one in info.kernel_tensors.items():
                one.data.copy_(getattr(layer, name))
        layer._parameters.update(info.kernel_tensors)
        info.kernel_tensors, info.load_numel, info.load_numel_total = None, 0, None
