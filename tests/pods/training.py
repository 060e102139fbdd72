"""Training that a Job of pods runs until a file is there; all ranks see it at the same step."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import remesh

FOLDER = Path(sys.argv[1])
DATA = TensorDataset(torch.randn(40_000, 8, generator=torch.Generator().manual_seed(0)))


def train(job: remesh.Job) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    group = job.mesh["dp"].get_group()
    forward = DistributedDataParallel(model, process_group=group)
    job.carry(model=model, optimizer=optimizer)
    for (x,) in job.batches(DATA, batch_size=16, max_steps=100_000):
        if (FOLDER / "raise").exists():
            raise ValueError("the training has an error")
        is_last = torch.tensor([(FOLDER / "finish").exists()], dtype=torch.int32)
        torch.distributed.all_reduce(is_last, torch.distributed.ReduceOp.MAX, group)
        loss = torch.nn.functional.mse_loss(forward(x), x) * job.batch_weight
        loss.backward()
        if job.commit():
            optimizer.step()
        optimizer.zero_grad()
        print(f"STEP {job.step} world {job.mesh.size()}", flush=True)
        if is_last.item():
            break
        time.sleep(0.1)


remesh.elastic(train, mesh={"dp": -1}, checkpoint=str(FOLDER / "checkpoints"), save_every=20)
