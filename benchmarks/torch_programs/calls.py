"""A program that Remesh carries, and that compares its group with the real one beneath. NUM_PAIRS [apart].

Short bursts of small all_reduces on either take turns in the same processes, so that Linux puts both in the same
places and other programs disturb both. With ``apart`` each rank has one processor.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

_CLOCKS = {"passed": time.perf_counter, "computed": time.thread_time}
_BURST = 50


def time_burst(group: dist.ProcessGroup) -> dict[str, float]:
    """Seconds of an all_reduce of 4 bytes by each clock; the second is that of the thread that calls."""
    dist.barrier(group=group)
    began = {name: clock() for name, clock in _CLOCKS.items()}
    for _ in range(_BURST):
        dist.all_reduce(small, group=group)
    return {name: (clock() - began[name]) / _BURST for name, clock in _CLOCKS.items()}


def median_of(pick: Callable[[dict[str, float], dict[str, float]], float]) -> float:
    return median(pick(*pair) for pair in pairs)


rank, num_pairs = int(os.environ["RANK"]), int(sys.argv[1])
if sys.argv[2:] == ["apart"]:
    usable = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {usable[rank % len(usable)]})
dist.init_process_group("gloo")
small = torch.zeros(1)
carried = dist.group.WORLD
native = carried.real  # type: ignore[union-attr]  # of a `CarriedGroup`
pairs = [(time_burst(native), time_burst(carried)) for _ in range(num_pairs)]
if rank == 0:
    found = {
        name: {
            "native": median_of(lambda alone, _, name=name: alone[name]),
            "added": median_of(lambda alone, ours, name=name: ours[name] - alone[name]),
        }
        for name in _CLOCKS
    }
    print(json.dumps(found), flush=True)
dist.destroy_process_group()
