"""FSDP2 and tensor parallelism on one mesh of two axes. STEPS"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, 8))
for block in list(model)[:3]:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1, int(sys.argv[1]) + 1):
    generator = torch.Generator().manual_seed(1000 * step + rank // 2)
    x, y = torch.randn(16, WIDTH, generator=generator), torch.randint(0, 8, (16,), generator=generator)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model[-1].parameters(), 1.0)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(step, mean.item().hex(), flush=True)
whole = b"".join(each.full_tensor().detach().numpy().tobytes() for each in model.parameters())
print("end", rank, hashlib.sha256(whole).hexdigest(), flush=True)
dist.destroy_process_group()
