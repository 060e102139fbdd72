"""A program that Remesh carries, and that climbs from the real group beneath its own to that. NUM_TURNS [apart].

Short bursts of small all_reduces on each rung take turns in the same processes, so that Linux puts all in the same
places and other programs disturb all. With ``apart`` each rank has one processor.
"""

import json
import os
import sys
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from remesh.carried.torch import anew
from remesh.carried.torch.groups import CarriedGroup
from remesh.carried.torch.short import SHORT

_CLOCKS = {"passed": time.perf_counter, "computed": time.thread_time}
"""The second is that of the thread that calls."""
_BURST = 50


class Forwards:
    """What any group in Python does: it is called, and calls the real one."""

    def allreduce(self, *args: Any, **options: Any) -> Any:
        return native.allreduce(*args, **options)


class InPython:
    """Ours without the extension."""

    def allreduce(self, *args: Any, **options: Any) -> Any:
        return CarriedGroup.allreduce(carried, *args, **options)


def time_burst(group: Any, extension: Any) -> dict[str, float]:
    """Seconds of an all_reduce of 4 bytes by each clock, with or without the extension in C."""
    anew.SHORT = extension
    dist.barrier(native)
    began = {name: clock() for name, clock in _CLOCKS.items()}
    for _ in range(_BURST):
        dist.all_reduce(small, group=group)
    return {name: (clock() - began[name]) / _BURST for name, clock in _CLOCKS.items()}


rank, num_turns = int(os.environ["RANK"]), int(sys.argv[1])
if sys.argv[2:] == ["apart"]:
    usable = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {usable[rank % len(usable)]})
dist.init_process_group("gloo")
small = torch.zeros(1)
carried: Any = dist.group.WORLD
native = carried.real
rungs = {
    "native": (native, None),
    "forwards": (Forwards(), None),
    "python": (InPython(), None),
    "ours": (carried, SHORT),
}
turns = [{name: time_burst(*rung) for name, rung in rungs.items()} for _ in range(num_turns)]
if rank == 0:
    found = {
        clock: {
            name: median(turn[name][clock] - (turn["native"][clock] if name != "native" else 0) for turn in turns)
            for name in rungs
        }
        for clock in _CLOCKS
    }
    print(json.dumps(found), flush=True)
dist.destroy_process_group()
