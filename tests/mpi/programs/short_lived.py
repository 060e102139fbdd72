"""Communicators are made, used and freed in each step; some by who is ahead while others have still to come.

The first rank of a pair needs nobody for its last broadcast: it frees their communicator, and goes on to a receive,
while the second one sleeps before that broadcast.
"""

import sys
import time

from gate import wait_at_gate
from mpi4py import MPI


def main(steps: int, pause_s: float) -> None:
    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    total = 0
    for step in range(steps):
        if rank == 0 and step == steps - 1:
            wait_at_gate()
        everybody, alone = comm.Dup(), MPI.COMM_SELF.Dup()
        total = (total * 31 + everybody.allreduce(rank + step) + alone.allreduce(step)) % 1_000_003
        everybody.Free()
        pair = comm.Create_group(comm.group.Incl([rank // 2 * 2, rank // 2 * 2 + 1]))
        total += pair.bcast(rank * step)
        if pair.rank == 1:
            time.sleep(pause_s)
        total += pair.bcast(rank + step)
        if pair.rank == 1:
            comm.send(total, rank - 1)
        pair.Free()
        alone.Free()
        if rank % 2 == 0:
            total = (total + comm.recv(source=rank + 1)) % 1_000_003
    found = comm.gather(total)
    if rank == 0:
        print("answer", *found, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
