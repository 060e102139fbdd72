"""Conjugate gradients on a one-dimensional Laplacian, by rows; dot products are summed exactly."""

import hashlib
import math
import sys
import time

import numpy as np
from gate import wait_at_gate
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
line = comm.Create_cart([size], periods=[False])
left, right = line.Shift(0, 1)


def dot(a: np.ndarray, b: np.ndarray) -> float:
    return math.fsum(comm.allgather(math.fsum(a * b)))


def apply(p: np.ndarray) -> np.ndarray:
    halo = np.zeros(2)
    line.Sendrecv(p[:1], dest=left, recvbuf=halo[1:], source=right)
    line.Sendrecv(p[-1:], dest=right, recvbuf=halo[:1], source=left)
    padded = np.concatenate([halo[:1], p, halo[1:]])
    return 2.5 * p - padded[:-2] - padded[2:]


def main(steps: int, pause_s: float) -> None:
    b = np.sin(np.arange(64.0) + 64 * rank)
    x = np.zeros_like(b)
    r = b.copy()
    p = r.copy()
    rr = dot(r, r)
    for step in range(steps):
        if rank == 0 and step == steps - 1:
            wait_at_gate()
        q = apply(p)
        alpha = rr / dot(p, q)
        x += alpha * p
        r -= alpha * q
        rr, before = dot(r, r), rr
        if rr < 1e-24 or step % 40 == 39:
            # Begin anew with another right side, so that any number of steps has work.
            b = np.roll(b, 1) + 1e-3 * step
            r = b - apply(x)
            p = r.copy()
            rr = dot(r, r)
        else:
            p = r + (rr / before) * p
        if pause_s:
            time.sleep(pause_s)
    parts = comm.gather(hashlib.sha256(x.tobytes()).hexdigest())
    if rank == 0:
        print("answer", hashlib.sha256(f"{parts} {rr!r}".encode()).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
