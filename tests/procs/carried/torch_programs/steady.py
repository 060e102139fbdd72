"""Sums of sums, a hundred in a second at most, so that the machine is left to others. [STEPS FILE]

Without STEPS there is no end. Before the last one it waits until there is such a file.
"""

import itertools
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
value = torch.arange(100.0) + rank
num_steps, go = (int(sys.argv[1]), Path(sys.argv[2])) if sys.argv[1:] else (0, Path())
for step in range(1, 1 + num_steps) if num_steps else itertools.count(1):
    while step == num_steps and not go.exists():
        time.sleep(0.01)
    value = torch.sin(value) + rank
    dist.all_reduce(value)
    value /= world
    if rank == 0:
        print(step, value.sum().item().hex(), flush=True)
    time.sleep(0.01)
print("end", rank, value.norm().item().hex(), flush=True)
dist.destroy_process_group()
