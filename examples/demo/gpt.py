"""A small byte-level GPT, its tensor-parallel plan, and real text that every machine has."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

NUM_BYTES = 256


class Block(nn.Module):
    """Attention and MLP, each behind a norm; linear layers are kept apart so that heads can be split over ranks."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

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


class GPT(nn.Module):
    def __init__(self, width: int = 64, num_layers: int = 2, num_heads: int = 8, context: int = 64) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(NUM_BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        x_BTC = self.embed(bytes_BT) + self.place(torch.arange(bytes_BT.shape[1]))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.norm(x_BTC))


def parallelize(model: GPT, mesh: DeviceMesh) -> GPT:
    """Split heads and MLP over the mesh axis ``tp``, as Megatron does; everything else is replicated."""
    if "tp" in mesh.mesh_dim_names and mesh["tp"].size() > 1:
        columns = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
        rows = dict.fromkeys(("out", "down"), RowwiseParallel())
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {**columns, **rows})
    return model


class StandardLibraryText(torch.utils.data.Dataset):
    """Windows of the source code of Python's standard library, as (index, bytes)."""

    def __init__(self, num_samples: int, context: int = 64) -> None:
        self.num_samples = num_samples
        self.length = context + 1
        wanted = num_samples * self.length
        text = b""
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= wanted:
                break
        self.bytes = torch.frombuffer(bytearray(text[:wanted]), dtype=torch.uint8).view(num_samples, self.length)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.bytes[index].long()
