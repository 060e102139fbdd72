"""Holds many megabytes and changes a part of them; says when it is there."""

import sys
import time

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
mib, share, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
block = np.random.default_rng(comm.Get_rank()).integers(0, 256, mib << 20, dtype=np.uint8)
comm.Barrier()
if comm.Get_rank() == 0:
    print("there", flush=True)
end_s = time.monotonic() + seconds
while True:
    block[: int(len(block) * share)] += np.uint8(1)
    if comm.allreduce(int(time.monotonic() >= end_s), op=MPI.MAX):
        break
    time.sleep(0.05)
total = comm.allreduce(int(block.sum()))
if comm.Get_rank() == 0:
    print("answer", total > 0, flush=True)
