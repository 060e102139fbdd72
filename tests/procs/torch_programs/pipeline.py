"""A pipeline of torch's own, with one forward and one backward in turn. STEPS"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH = 32
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
stage = PipelineStage(module, rank, world, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=2 * world, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
for step in range(1, int(sys.argv[1]) + 1):
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(4 * world, WIDTH, generator=generator) for _ in range(2))
    optimizer.zero_grad()
    losses = []
    if rank == 0:
        schedule.step(x)
    elif rank == world - 1:
        schedule.step(target=y, losses=losses)
    else:
        schedule.step()
    optimizer.step()
    if rank == world - 1:
        print(step, sum(loss.item() for loss in losses).hex(), flush=True)
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in module.parameters())).hexdigest()
print("end", rank, digest, flush=True)
dist.destroy_process_group()
