"""A small byte-level GPT twice: as it is trained, and as it generates, with fused QKV and another tensor parallelism.

Both compute logits by the same function, `compute_logits`: head by head, and the MLP slice by slice, adding what they
contribute in a fixed order. So the bits of the logits depend on the weights only, not on how many ranks share them.
Shapes: B batch, T time, C width, D width of a head, V bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, NUM_HEADS, NUM_LAYERS, CONTEXT, NUM_BYTES = 48, 6, 2, 32, 256
HEAD, HIDDEN = WIDTH // NUM_HEADS, 4 * WIDTH
SLICE = HIDDEN // NUM_HEADS
PARTS = ("query", "key", "value")


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        h_BTC = self.norm1(x_BTC)
        # The number of heads on this rank follows from what the rank's part of the layer returns.
        heads = [part(h_BTC).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        a_BHTD = F.scaled_dot_product_attention(*heads, is_causal=True)
        x_BTC = x_BTC + self.out(a_BHTD.transpose(1, 2).flatten(-2))
        return x_BTC + self.down(F.gelu(self.up(self.norm2(x_BTC))))


class GPT(nn.Module):
    """The model as it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(NUM_BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_BYTES, bias=False)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        x_BTC = self.embed(bytes_BT) + self.place(torch.arange(bytes_BT.shape[1]))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.norm(x_BTC))


def parallelize(model: GPT, mesh: DeviceMesh) -> GPT:
    """FSDP2 over the axis ``dp``, tensor parallelism over ``tp``."""
    columns = dict.fromkeys((*PARTS, "up"), ColwiseParallel())
    rows = dict.fromkeys(("out", "down"), RowwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {**columns, **rows})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


@dataclass(frozen=True)
class Weights:
    """One rank's weights by name; of layers that tensor parallelism cuts its own rows or columns."""

    tensors: dict[str, torch.Tensor]
    join: Callable[[torch.Tensor], torch.Tensor]
    """Concatenates what the ranks of the tensor parallelism have, along the first dim, in order of ranks."""

    def block(self, layer: int, name: str) -> torch.Tensor:
        return self.tensors[f"blocks.{layer}.{name}.weight"]

    def norm(self, name: str, x_BTC: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x_BTC, (WIDTH,), self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])


@torch.no_grad()
def compute_logits(weights: Weights, bytes_BT: torch.Tensor) -> torch.Tensor:
    """Logits whose bits do not depend on how the weights are cut."""
    tensors = weights.tensors
    x_BTC = tensors["embed.weight"][bytes_BT] + tensors["place.weight"][: bytes_BT.shape[1]]
    for layer in range(NUM_LAYERS):
        h_BTC = weights.norm(f"blocks.{layer}.norm1", x_BTC)
        parts = [weights.block(layer, name).split(HEAD) for name in PARTS]
        outs = weights.block(layer, "out").split(HEAD, dim=1)
        x_BTC = _add_up(x_BTC, weights, [_attend(h_BTC, *each) for each in zip(*parts, outs, strict=True)])
        h_BTC = weights.norm(f"blocks.{layer}.norm2", x_BTC)
        ups, downs = weights.block(layer, "up").split(SLICE), weights.block(layer, "down").split(SLICE, dim=1)
        slices = zip(ups, downs, strict=True)
        x_BTC = _add_up(x_BTC, weights, [_apply(F.gelu(_apply(h_BTC, up)), down) for up, down in slices])
    return _apply(weights.norm("norm", x_BTC), tensors["head.weight"])


def _attend(h_BTC: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """What one head contributes."""
    q_BTD, k_BTD, v_BTD = (_apply(h_BTC, weight) for weight in weights[:3])
    return _apply(F.scaled_dot_product_attention(q_BTD, k_BTD, v_BTD, is_causal=True), weights[3])


def _apply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # A copy: kernels may take another path for other strides or alignments.
    return F.linear(x, weight.clone(memory_format=torch.contiguous_format))


def _add_up(x_BTC: torch.Tensor, weights: Weights, mine: list[torch.Tensor]) -> torch.Tensor:
    """Add the contributions of all ranks one after the other."""
    for each_BTC in weights.join(torch.stack(mine)):
        x_BTC = x_BTC + each_BTC
    return x_BTC
