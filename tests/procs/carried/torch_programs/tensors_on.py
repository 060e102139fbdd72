"""Sums of tensors that stay on a device: BACKEND DEVICE, as in ``nccl cuda``. Without an end."""

import itertools
import os
import sys
import time

import torch
import torch.distributed as dist

backend, device = sys.argv[1:]
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group(backend)
value = torch.zeros(1000, dtype=torch.int64, device=device)
for step in itertools.count(1):
    value += step
    total = value.clone() if backend == "nccl" else value.to("cpu", copy=True)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(step, total.sum().item(), flush=True)
    time.sleep(0.01)
