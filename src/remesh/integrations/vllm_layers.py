"""Parameters of vLLM layers that process their weights after loading, laid open for an update.

A layer of vLLM gets its weights as a checkpoint has them, and then its method processes them: kernels of experts want
gate and up the other way round, or rows shuffled; on a CPU matrices are packed elsewhere, and the parameter is left
empty. A weight that is written into the parameter then is wrong, or never used, and its shape need not show it.

1. Layers whose method leaves weights unchanged are filled in place.
2. All others are laid open for an update, by vLLM's own reload: their parameters are made as they were before the first
   processing, filled, processed by the layer's method, and copied to where they have been.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.platforms import current_platform

from remesh.foundation.errors import ConfigError

_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def processed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers, by name, whose parameters are not, or may not be, as a checkpoint has them."""
    return {name: layer for name, layer in model.named_modules() if _is_processed(layer)}


def _is_processed(layer: nn.Module) -> bool:
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase) or is_deferred_attention_layer(layer):
        return False
    is_left_alone = type(method) in _PLAIN and current_platform.is_cuda()
    return not is_left_alone and bool(get_layerwise_info(layer).restore_metadata[0])


def packs_once(layers: Collection[nn.Module]) -> bool:
    """Whether there are layers that vLLM processes at their first load alone: experts on a CPU."""
    return current_platform.is_cpu() and any(type(layer.quant_method) not in _PLAIN for layer in layers)


def parameters_of(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """All parameters as a checkpoint has them; those of processed ``layers`` on ``meta`` unless laid open."""
    hidden = {f"{name}.{key}" for name, layer in layers.items() for key in layer._parameters}
    found: dict[str, torch.Tensor] = {name: one for name, one in model.named_parameters() if name not in hidden}
    for name, layer in layers.items():
        info = get_layerwise_info(layer)
        made, held = info.restore_metadata[0], dict(layer.named_parameters(recurse=False))
        wanted = held if info.can_load() else held | made
        found |= {f"{name}.{key}": one for key, one in wanted.items() if key in made or key == "bias"}
    return found


def layers_to_open(
    layers: Mapping[str, nn.Module], made_of: Mapping[str, Collection[str]], sent: Collection[str]
) -> list[nn.Module]:
    """Of the processed ``layers`` those that an update touches; `ConfigError` if it brings a part of a layer alone."""
    sources: dict[str, set[str]] = {}
    for name, parts in made_of.items():
        sources.setdefault(name.rpartition(".")[0], set()).update(parts)
    touched = [name for name in layers if not sources.get(name, set()).isdisjoint(sent)]
    if missing := sorted({one for name in touched for one in sources[name]}.difference(sent)):
        raise ConfigError(
            f"updating weights: found {len(missing)} tensors that are not sent with others of their layers, expected "
            "all of a layer, whose kernel does not keep them apart; add them to source.only:\n  " + "\n  ".join(missing)
        )
    return [layers[name] for name in touched]


@contextmanager
def laid_open(layers: Collection[nn.Module], model_config: Any) -> Iterator[None]:
    """Layers with parameters to be filled, which are processed behind the block; an error leaves them as they were."""
    opened: list[nn.Module] = []
    try:
        for layer in layers:
            opened.append(layer)
            initialize_layerwise_reload(layer)
            materialize_layer(layer, get_layerwise_info(layer))
            for key in get_layerwise_info(layer).restore_metadata[0]:
                layer.get_parameter(key).zero_()  # of vocabularies the last rows are padding
        yield
    except BaseException:
        for layer in opened:
            info = get_layerwise_info(layer)
            info.load_numel = info.load_numel_total = 0  # nothing came: what was there is put back
            finalize_layerwise_reload(layer, model_config)
        raise
    for layer in opened:
        info = get_layerwise_info(layer)
        info.load_numel, info.load_numel_total = 1, 2  # as of layers that are not filled to the last element
        finalize_layerwise_reload(layer, model_config)
