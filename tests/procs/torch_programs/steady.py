"""Sums of sums, a hundred in a second at most, so that the machine is left to others. [STEPS], else without an end."""

import itertools
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
value = torch.arange(100.0) + rank
for step in range(1, 1 + int(sys.argv[1])) if sys.argv[1:] else itertools.count(1):
    value = torch.sin(value) + rank
    dist.all_reduce(value)
    value /= world
    if rank == 0:
        print(step, value.sum().item().hex(), flush=True)
    time.sleep(0.01)
print("end", rank, value.norm().item().hex(), flush=True)
dist.destroy_process_group()
