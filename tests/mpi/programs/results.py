"""Ranks write a result file together, in steps, and read their neighbour's block of the same step.

``results.py STEPS PAUSE FILE [table]``. Ranks write one after the other, so that the file grows from front to back.
With ``table`` it has its whole length from the start, and all write their blocks at once.
"""

import hashlib
import sys
import time

import numpy as np
from gate import wait_at_gate
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
steps, pause_s, path = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
width = 3000
file = MPI.File.Open(comm, path, MPI.MODE_CREATE | MPI.MODE_RDWR)
is_table = "table" in sys.argv
if is_table:
    file.Set_size(8 * width * size * steps)
mine = np.arange(width, dtype=np.int64) * (rank + 1)
for step in range(steps):
    if rank == 0 and step == steps - 1:
        wait_at_gate()
    first = step * width * size + rank * width
    if is_table:
        file.Write_at_all(8 * first, mine)
    for turn in range(0 if is_table else size):
        if turn == rank:
            file.Write_at(8 * first, mine)
        comm.Barrier()
    neighbour = np.empty(width, dtype=np.int64)
    file.Sync()
    comm.Barrier()
    file.Read_at_all(8 * (step * width * size + (rank + 1) % size * width), neighbour)
    mine = mine + neighbour[::-1] % 1009
    time.sleep(pause_s)
file.Close()
if rank == 0:
    with open(path, "rb") as whole:
        print(f"answer {hashlib.blake2b(whole.read(), digest_size=8).hexdigest()}", flush=True)
