"""A training script as anybody writes it: DDP, AdamW, dropout, DataLoader, a log file. STEPS [WORKERS]"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

steps, workers = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
ddp = DistributedDataParallel(model, bucket_cap_mb=1)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(2048, 32, generator=generator), torch.randint(0, 8, (2048,), generator=generator))
sampler = DistributedSampler(data, shuffle=True, seed=3)
torch.manual_seed(100 + rank)
step = epoch = 0
while step < steps:
    sampler.set_epoch(epoch)
    epoch += 1
    for x, y in DataLoader(data, batch_size=16, sampler=sampler, num_workers=workers):
        loss = nn.functional.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        step += 1
        if rank == 0:
            print(step, mean.item().hex(), flush=True)
        if step == steps:
            break
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
print("end", rank, digest, flush=True)
dist.destroy_process_group()
