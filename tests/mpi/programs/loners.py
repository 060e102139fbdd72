"""Each rank writes its own records of a shared file at its own speed, with no word to the others; ``STEPS PAUSE FILE``.

Ranks are never together in the file before its end, so a checkpoint finds it with holes.
"""

import hashlib
import random
import sys
import time

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
steps, pause_s, path = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
chance = random.Random(rank)
file = MPI.File.Open(comm, path, MPI.MODE_CREATE | MPI.MODE_WRONLY)
for step in range(steps):
    file.Write_at((step * size + rank) * 8, step.to_bytes(4, "little") + rank.to_bytes(4, "little"))
    time.sleep(pause_s * chance.random())
file.Close()
if rank == 0:
    with open(path, "rb") as whole:
        print(f"answer {hashlib.blake2b(whole.read(), digest_size=8).hexdigest()}", flush=True)
