"""Jacobi iteration on a square, by rows, with halo exchange; sums are exact, so the answer depends on nothing else."""

import hashlib
import math
import sys
import time

import numpy as np
from gate import wait_at_gate
from mpi4py import MPI


def main(steps: int, pause_s: float) -> None:
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    columns, rows = 96, 24
    grid = np.zeros((rows + 2, columns))
    grid[:, 0] = 1.0 + rank
    up = rank - 1 if rank else MPI.PROC_NULL
    down = rank + 1 if rank < size - 1 else MPI.PROC_NULL
    residual = 0.0
    for step in range(steps):
        if rank == 0 and step == steps - 1:
            wait_at_gate()
        requests = [
            comm.Irecv(grid[0], source=up, tag=1),
            comm.Irecv(grid[-1], source=down, tag=2),
            comm.Isend(grid[1].copy(), dest=up, tag=2),
            comm.Isend(grid[-2].copy(), dest=down, tag=1),
        ]
        MPI.Request.Waitall(requests)
        new = grid.copy()
        new[1:-1, 1:-1] = 0.25 * (grid[:-2, 1:-1] + grid[2:, 1:-1] + grid[1:-1, :-2] + grid[1:-1, 2:])
        if step % 10 == 0:
            change = float(np.abs(new - grid).max())
            residual = comm.allreduce(change, op=MPI.MAX)
        grid = new
        if pause_s:
            time.sleep(pause_s)
    parts = comm.gather(hashlib.sha256(grid[1:-1].tobytes()).hexdigest())
    total = math.fsum(comm.allgather(float(grid[1:-1].sum())))
    if rank == 0:
        print("answer", hashlib.sha256(f"{parts} {residual!r} {total!r}".encode()).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
