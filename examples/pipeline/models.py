"""The models of `configs.json`: how each is built, cut, and fed."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gpt
import torch
import u_transformer
from torch import nn

_CONFIGS = Path(__file__).with_name("configs.json")


@dataclass(frozen=True)
class Recipe:
    """All that is needed to train one of the models."""

    build: Callable[[], nn.Module]
    """The model with random weights."""
    cut: Callable[[int], list[str]]
    """From a number of stages to the modules at which they begin."""
    entry: str
    """Name of the model's one argument."""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    make_batch: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
    """From (number of samples, seed) to a batch and its target."""
    batch: int
    num_microbatches: int
    dtype: torch.dtype
    mesh: tuple[int, int, int]
    """Data, operator and pipeline parallelism."""


def names() -> list[str]:
    """Names of all configurations."""
    return [name for name in json.loads(_CONFIGS.read_text()) if name != "about"]


def recipe_of(name: str) -> Recipe:
    """The recipe of a configuration."""
    form: dict[str, Any] = json.loads(_CONFIGS.read_text())[name]
    dtype = getattr(torch, form["dtype"])
    shared = {
        "batch": form.get("batch", 1024),
        "num_microbatches": form.get("num_microbatches", 64),
        "dtype": dtype,
        "mesh": tuple(form["mesh"]),
    }
    if form["model"] == "gpt":
        config = _read(gpt.GPTConfig, form)

        def tokens(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
            shape = (num_samples, config.context + 1)
            text = torch.randint(config.vocabulary, shape, generator=torch.Generator().manual_seed(seed))
            return text[:, :-1].contiguous(), text[:, 1:].contiguous()

        return Recipe(
            lambda: gpt.GPT(config).to(dtype),
            lambda num: gpt.cuts_of(config, num),
            "tokens",
            gpt.loss_of,
            tokens,
            **shared,
        )
    u_config = _read(u_transformer.UTransformerConfig, form)

    def images(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (2, num_samples, 3, u_config.image, u_config.image)
        noisy, clean = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        return noisy, clean

    return Recipe(
        lambda: u_transformer.UTransformer(u_config).to(dtype),
        lambda num: u_transformer.cuts_of(u_config, num),
        "image",
        u_transformer.loss_of,
        images,
        **shared,
    )


def _read(config: type, form: dict[str, Any]) -> Any:
    return config(**{field.name: form[field.name] for field in fields(config) if field.name in form})
