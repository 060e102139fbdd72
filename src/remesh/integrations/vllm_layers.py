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
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

from remesh.foundation.errors import ConfigError
from remesh.layout.recorded import Recorded

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


def _attention_of(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if is_deferred_attention_layer(layer)]


def packs_once(layers: Collection[nn.Module]) -> bool:
    """Whether there are layers that vLLM processes at their first load alone: experts on a CPU."""
    return current_platform.is_cpu() and any(type(layer.quant_method) not in _PLAIN for layer in layers)


def parameters_of(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """All parameters as a checkpoint has them; those of processed ``layers`` on ``meta`` unless laid open."""
    hidden = {id(one) for layer in layers.values() for one in layer._parameters.values()}
    for layer in _attention_of(model):  # which compute some of their own
        made = get_layerwise_info(layer).restore_metadata[0]
        hidden |= {id(one) for key, one in layer._parameters.items() if key not in made}
    found: dict[str, torch.Tensor] = {name: one for name, one in model.named_parameters() if id(one) not in hidden}
    tied: dict[int, torch.Tensor] = {}
    for name, layer in layers.items():
        info = get_layerwise_info(layer)
        made, held = info.restore_metadata[0], dict(layer.named_parameters(recurse=False))
        for key, one in (held if info.can_load() else held | made).items():
            if key in made or key == "bias":
                # A parameter that two layers share was captured twice.
                found[f"{name}.{key}"] = tied.setdefault(id(held.get(key, one)), one)
    return found


@contextmanager
def standing_in(
    model: nn.Module, layers: Mapping[str, nn.Module], others: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Other tensors in the places of all parameters, with what loaders find on these; until the end of the block."""
    held = {layer: dict(layer._parameters) for layer in model.modules()}
    wanted = parameters_of(model, layers)
    made: dict[int, torch.Tensor] = {}
    try:
        for name, one in others.items():
            path, _, key = name.rpartition(".")
            layer, stands_for = model.get_submodule(path), wanted[name]
            stand_in = one.detach()
            stand_in.__class__, stand_in.__dict__ = stands_for.__class__, dict(stands_for.__dict__)
            made[id(held[layer].get(key))] = restore_layer_refs(stand_in, layer)
            layer._parameters[key] = made[id(held[layer].get(key))]  # type: ignore[assignment]
        for layer, parameters in held.items():  # which may share some
            shared = {key: made[id(one)] for key, one in parameters.items() if one is not None and id(one) in made}
            layer._parameters.update(shared)  # type: ignore[arg-type]
        yield
    finally:
        for layer, parameters in held.items():
            layer._parameters.clear()
            layer._parameters.update(parameters)


def recompute_attention(model: nn.Module, model_config: Any) -> None:
    """Have attention layers compute what they make of weights of layers below them: the absorbed factors of MLA."""
    for layer in _attention_of(model):
        if any(True for _ in layer.children()):
            layer.process_weights_after_loading(model_config.dtype)  # type: ignore[operator]


def layers_to_open(layers: Mapping[str, nn.Module], recorded: Recorded, sent: Collection[str]) -> list[nn.Module]:
    """Of the processed ``layers`` those that an update touches; `ConfigError` if it brings a part of a layer alone."""
    sources: dict[str, set[str]] = {}
    for name in recorded.targets:
        sources.setdefault(name.rpartition(".")[0], set()).update(recorded.made_of(name))
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
