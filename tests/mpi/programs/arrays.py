"""Long messages between NumPy arrays round a ring, with a collective now and then; the digest of all that came."""

import hashlib
import sys
import time

import numpy as np
from gate import wait_at_gate
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
steps, pause_s = int(sys.argv[1]), float(sys.argv[2])
num = 200_000
given = np.arange(num, dtype=np.int64) * (rank + 1)
taken = np.empty(num, dtype=np.int64)
kept = np.zeros(1_000_000, dtype=np.int64)
digest = hashlib.blake2b(digest_size=8)
for step in range(steps):
    if rank == 0 and step == steps - 1:
        wait_at_gate()
    request = comm.Irecv(taken, (rank - 1) % size, 7)
    comm.Send(given, (rank + 1) % size, 7)
    request.Wait()
    comm.Sendrecv(taken[: num // 2], (rank + 1) % size, 8, given[num // 2 :], (rank - 1) % size, 8)
    given, taken = taken + step, np.empty_like(given)
    kept[step * 100 : step * 100 + 100] += given[:100]
    total = np.empty_like(given)
    comm.Allreduce(given, total, MPI.SUM)
    comm.Allreduce(MPI.IN_PLACE, total[: num // 2], MPI.MAX)
    comm.Alltoall(MPI.IN_PLACE, total[: num // 4 // size * size])
    digest.update(total.tobytes())
    time.sleep(pause_s)
digest.update(kept.tobytes())
print(f"answer {digest.hexdigest()}" if rank == 0 else "", flush=True)
