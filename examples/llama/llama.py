"""A small Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU; cut into stages, under TP and FSDP2.

As in torchtitan, a stage is the model without the layers of the others: every parameter keeps its name, and `forward`
passes over what is not there. Shapes: B batch, T time, C width, H heads, D width of a head, V vocabulary.
"""

import pydoc_data.topics
import re
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model."""

    width: int = 64
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    hidden: int = 192
    context: int = 32
    vocabulary: int = 2048


class Attention(nn.Module):
    """Causal attention; several query heads share a key and a value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        kv_width = self.head_width * config.num_kv_heads
        self.wq, self.wo = (nn.Linear(config.width, config.width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(config.width, kv_width, bias=False) for _ in range(2))

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        # The number of heads on this rank follows from what the rank's part of the layer returns.
        q_BHTD, k_BHTD, v_BHTD = (
            layer(x_BTC).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)
        )
        out_BHTD = F.scaled_dot_product_attention(
            rotate(q_BHTD), rotate(k_BHTD), v_BHTD, is_causal=True, enable_gqa=True
        )
        return self.wo(out_BHTD.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(config.width, config.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x_BTC)) * self.w3(x_BTC))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention, self.feed_forward = Attention(config), FeedForward(config)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
        return x_BTC + self.feed_forward(self.ffn_norm(x_BTC))


class Llama(nn.Module):
    """The whole model, or one stage of it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleDict({str(number): TransformerBlock(config) for number in range(config.num_layers)})
        self.norm = nn.RMSNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_BTC = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            x_BTC = layer(x_BTC)
        return self.output(self.norm(x_BTC)) if self.output is not None else x_BTC


def rotate(x_BHTD: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs of numbers turn by an angle that grows with the position."""
    time, half = x_BHTD.shape[-2], x_BHTD.shape[-1] // 2
    frequencies_D = 10000.0 ** (-torch.arange(half, dtype=x_BHTD.dtype) / half)
    angles_TD = torch.arange(time, dtype=x_BHTD.dtype)[:, None] * frequencies_D
    first, second = x_BHTD.chunk(2, -1)
    cos, sin = angles_TD.cos(), angles_TD.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def cut(model: Llama, stage: int, num_stages: int) -> Llama:
    """Leave to the model what belongs to one of its stages."""
    per_stage = -(-len(model.layers) // num_stages)
    for name in list(model.layers):
        if int(name) // per_stage != stage:
            del model.layers[name]
    if stage > 0:
        model.tok_embeddings = None
    if stage < num_stages - 1:
        model.norm = model.output = None
    return model


def parallelize(model: Llama, mesh: DeviceMesh) -> Llama:
    """Tensor parallelism inside each layer, then FSDP2 around it."""
    columns = dict.fromkeys(
        ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"), ColwiseParallel()
    )
    rows = dict.fromkeys(("attention.wo", "feed_forward.w2"), RowwiseParallel())
    for layer in model.layers.values():
        parallelize_module(layer, mesh["tp"], {**columns, **rows})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


class PythonDocs(torch.utils.data.Dataset):
    """Python's own documentation, which every Python has, as windows of words; rare words are word 0."""

    def __init__(self, config: LlamaConfig) -> None:
        words = re.findall(r"\w+|[^\w\s]", "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())))
        common = [word for word, _ in Counter(words).most_common(config.vocabulary - 1)]
        numbers = {word: number for number, word in enumerate(common, 1)}
        length = config.context + 1
        tokens = torch.tensor([numbers.get(word, 0) for word in words])
        self.windows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.windows[index]
