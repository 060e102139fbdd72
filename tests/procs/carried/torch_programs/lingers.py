"""Communicates after its last line: a thread of each rank goes on for some steps. STEPS [cut]

With ``cut``, rank 1 then ends at the moment at which a checkpoint has taken its groups, and rank 0 once it has them
again.
"""

import atexit
import contextlib
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist


def train() -> None:
    value = torch.ones(1)
    for step in range(int(sys.argv[1])):
        dist.all_reduce(value)
        value /= dist.get_world_size() + 1 / (step + 1)
        print(f"step {step} of rank {rank}: {value.item().hex()}", flush=True)
        time.sleep(0.01)


def has_groups() -> bool:
    with contextlib.suppress(OSError):  # a thread that has just ended
        return any("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))
    return True


def leave() -> None:
    while has_groups():
        time.sleep(0.001)
    while rank == 0 and not has_groups():
        time.sleep(0.001)
    print(f"rank {rank} leaves", flush=True)


dist.init_process_group("gloo")
rank = dist.get_rank()
if "cut" in sys.argv:
    atexit.register(leave)
threading.Thread(target=train).start()
