"""Rank 1 ends without a word after the second checkpoint, as its groups grow. HOW: ``python`` (os._exit) or ``c``."""

import ctypes
import gc
import os
import sys
import threading
import time

import torch
import torch.distributed as dist


def end_at_the_second_growth() -> None:
    control = next(each for each in gc.get_objects() if type(each).__name__ == "ControlThread")
    grow, num_growths = control._grow, 0

    def grow_or_end() -> str:
        nonlocal num_growths
        num_growths += 1
        if num_growths == 2 and sys.argv[1] == "c":
            ctypes.CDLL(None)._exit(0)
        if num_growths == 2:
            threading.Thread(target=os._exit, args=(0,), daemon=True).start()
            time.sleep(0.2)  # an end that waits for nothing is over by then
        return str(grow())

    control._grow = grow_or_end


dist.init_process_group("gloo")
rank, value = dist.get_rank(), torch.zeros(1)
dist.all_reduce(value)
if rank == 1:
    end_at_the_second_growth()
    time.sleep(1_000_000)
for step in range(1, 1501):
    print(step, flush=True)
    time.sleep(0.02)
