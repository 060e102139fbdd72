"""Many megabytes go round a ring, so that it can be seen which wires they took."""

import hashlib
import sys

import numpy as np
from mpi4py import MPI


def main(rounds: int, num_bytes: int) -> None:
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    mine = np.full(num_bytes, rank, dtype=np.uint8)
    got = np.empty_like(mine)
    for number in range(rounds):
        comm.Sendrecv(mine, dest=(rank + 1) % size, recvbuf=got, source=(rank - 1) % size)
        mine, got = got + np.uint8(number), mine
    parts = comm.gather(hashlib.sha256(mine.tobytes()).hexdigest())
    if rank == 0:
        print("answer", hashlib.sha256("".join(parts).encode()).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
