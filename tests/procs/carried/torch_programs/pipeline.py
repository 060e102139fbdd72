"""A pipeline of torch's own, with one forward and one backward in turn. STEPS [STAGES_A_RANK [BATCHES_A_STEP]]"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

WIDTH = 32
steps, stages_a_rank, batches = (int(word) for word in [*sys.argv[1:], "1", "1"][:3])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
modules = nn.ModuleList(
    nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(stages_a_rank)
)
stages = [
    PipelineStage(module, rank + turn * world, stages_a_rank * world, torch.device("cpu"))
    for turn, module in enumerate(modules)
]
if stages_a_rank == 1:
    schedule = Schedule1F1B(stages[0], n_microbatches=2 * world, loss_fn=nn.functional.mse_loss)
else:
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2 * world, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(modules.parameters(), lr=1e-2, momentum=0.9)
generator = torch.Generator().manual_seed(1)
for step in range(1, steps + 1):
    optimizer.zero_grad()
    losses = []
    for _ in range(batches):
        x, y = (torch.randn(4 * world, WIDTH, generator=generator) for _ in range(2))
        if rank == 0:
            schedule.step(x)
        elif rank == world - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
    optimizer.step()
    if rank == world - 1:
        print(step, sum(loss.item() for loss in losses).hex(), flush=True)
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in modules.parameters())).hexdigest()
print("end", rank, digest, flush=True)
dist.destroy_process_group()
