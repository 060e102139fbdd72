"""A U-Transformer: down through convolutions and attention, up again, with a long skip connection on every level.

What goes down a level is kept for the way up; cut into stages, these skips are edges between stages that may lie far
apart. Shapes: B batch, C channels, Y and X places.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class UTransformerConfig:
    """Sizes of a U-Transformer."""

    num_levels: int
    """Blocks on each side of the U; places are halved between them."""
    channels: int
    """On the highest level; each level below has ``growth`` times as many, rounded."""
    image: int
    """Places along each side. A power of two, at least ``2 ** num_levels``."""
    num_heads: int
    growth: float = 1.5

    def channels_at(self, level: int) -> int:
        """Channels of a level, a multiple of the number of heads."""
        return max(round(self.channels * self.growth**level / self.num_heads), 1) * self.num_heads


class Attention(nn.Module):
    """Every place looks at every other."""

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.GroupNorm(1, channels)
        self.query_key_value, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x_BCYX: torch.Tensor) -> torch.Tensor:
        parts = self.query_key_value(self.norm(x_BCYX)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts]
        found = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return x_BCYX + self.out(found.transpose(1, 2).reshape(x_BCYX.shape))


class Block(nn.Module):
    """Two convolutions with a residual, then attention."""

    def __init__(self, num_in: int, num_out: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(1, num_in), nn.GroupNorm(1, num_out)
        self.conv1 = nn.Conv2d(num_in, num_out, 3, padding=1)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1)
        self.short = nn.Conv2d(num_in, num_out, 1)
        self.attention = Attention(num_out, num_heads)

    def forward(self, x_BCYX: torch.Tensor) -> torch.Tensor:
        h_BCYX = self.conv1(F.silu(self.norm1(x_BCYX)))
        h_BCYX = self.conv2(F.silu(self.norm2(h_BCYX))) + self.short(x_BCYX)
        return self.attention(h_BCYX)


class UTransformer(nn.Module):
    """Predicts an image from an image."""

    def __init__(self, config: UTransformerConfig) -> None:
        super().__init__()
        sizes = [config.channels_at(level) for level in range(config.num_levels)]
        heads = config.num_heads
        self.enter = nn.Conv2d(3, sizes[0], 3, padding=1)
        before = [sizes[0], *sizes[:-1]]
        self.downs = nn.ModuleList(Block(a, b, heads) for a, b in zip(before, sizes, strict=True))
        self.middle = Block(sizes[-1], sizes[-1], heads)
        after = [*reversed(sizes[:-1]), sizes[0]]
        self.ups = nn.ModuleList(Block(2 * b, a, heads) for b, a in zip(reversed(sizes), after, strict=True))
        self.leave = nn.Conv2d(sizes[0], 3, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x_BCYX = self.enter(image)
        skips = []
        for down in self.downs:
            x_BCYX = down(x_BCYX)
            skips.append(x_BCYX)
            x_BCYX = F.avg_pool2d(x_BCYX, 2)
        x_BCYX = self.middle(x_BCYX)
        for up in self.ups:
            x_BCYX = F.interpolate(x_BCYX, scale_factor=2)
            x_BCYX = up(torch.cat([x_BCYX, skips.pop()], dim=1))
        return self.leave(x_BCYX)


def cuts_of(config: UTransformerConfig, num_stages: int) -> list[str]:
    """Two stages are cut at the bottom of the U, four on both its sides as well."""
    half = config.num_levels // 2
    if num_stages == 4 and half == 0:
        raise ValueError(f"cutting a U-Transformer of {config.num_levels} levels: expected 2 or more for 4 stages")
    names = {1: [], 2: ["ups.0"], 4: [f"downs.{half}", "ups.0", f"ups.{half}"]}
    if num_stages not in names:
        raise ValueError(f"cutting a U-Transformer into {num_stages} stages: expected 1, 2 or 4")
    return names[num_stages]


def loss_of(made_BCYX: torch.Tensor, image_BCYX: torch.Tensor) -> torch.Tensor:
    """Mean square distance to the image."""
    return F.mse_loss(made_BCYX, image_BCYX)
