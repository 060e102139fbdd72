"""A GPT whose parts are modules of their own, so that it can be cut anywhere between them.

Shapes: B batch, T time, C width, H heads, D width of a head, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT."""

    num_layers: int
    width: int
    num_heads: int
    context: int
    vocabulary: int


class Embed(nn.Module):
    """What a token is, and where it stands."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.place = nn.Embedding(config.context, config.width)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.token(tokens_BT) + self.place(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))


class Block(nn.Module):
    """Attention and MLP, each behind a norm; linear layers are apart so that heads can be split over ranks."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        h_BTC = self.norm1(x_BTC)
        # The number of heads on this rank follows from what the rank's part of the layer returns.
        q_BHTD, k_BHTD, v_BHTD = (
            layer(h_BTC).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        a_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        x_BTC = x_BTC + self.out(a_BHTD.transpose(1, 2).flatten(-2))
        return x_BTC + self.down(F.gelu(self.up(self.norm2(x_BTC))))


class Head(nn.Module):
    """From the last block to logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x_BTC))


class GPT(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = Embed(config)
        self.blocks = nn.ModuleList(Block(config.width, config.num_heads) for _ in range(config.num_layers))
        self.head = Head(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x_BTC = self.embed(tokens)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(x_BTC)


def cuts_of(config: GPTConfig, num_stages: int) -> list[str]:
    """Blocks in equal shares."""
    return [f"blocks.{stage * config.num_layers // num_stages}" for stage in range(1, num_stages)]


def loss_of(logits_BTV: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.flatten())
