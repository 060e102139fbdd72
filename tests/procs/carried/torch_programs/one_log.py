"""Ranks that share files in FOLDER, without an end: a log to which all append, and a table that all have mapped."""

import itertools
import logging
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(sys.argv[1])
logging.basicConfig(filename=folder / "train.log", level=logging.INFO, format="%(message)s", force=True)
if rank == 0:
    np.lib.format.open_memmap(folder / "table.npy", "w+", "i8", (dist.get_world_size(), 512)).flush()
dist.barrier()
table = np.load(folder / "table.npy", mmap_mode="r+")


def beat() -> None:
    number = 0
    while True:
        time.sleep(0.002)
        number += 1
        logging.info("%d beat %d", rank, number)
        table[rank, 0] += 1


# Rank 1 takes longer to stop, and its beat stops last.
threads = [*(threading.Thread(target=threading.Event().wait) for _ in range(100 * rank)), threading.Thread(target=beat)]
for thread in threads:
    thread.start()
for step in itertools.count(1):
    total = torch.ones(1)
    dist.all_reduce(total)
    logging.info("%d step %d", rank, step)
    if rank == 0:
        print(step, flush=True)
    time.sleep(0.01)
