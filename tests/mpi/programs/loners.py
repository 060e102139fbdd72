"""Each rank writes its records of a file at its own speed, with no word to the others.

``STEPS PAUSE FILE ENOUGH [shared]``.

Ranks are never together in the file before its end, so a checkpoint finds it with holes. With ``shared`` they take
places as they come; the answer is of the records in order. At half of them each waits for the file ENOUGH.
"""

import hashlib
import os
import random
import struct
import sys
import time

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
steps, pause_s, path, enough = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4]
chance = random.Random(rank)
file = MPI.File.Open(comm, path, MPI.MODE_CREATE | MPI.MODE_WRONLY)
for step in range(steps):
    while 2 * step >= steps and not os.path.exists(enough):
        time.sleep(0.01)
    record = struct.pack("<II", step, rank)
    if "shared" in sys.argv:
        file.Write_shared(record)
    else:
        file.Write_at((step * size + rank) * 8, record)
    time.sleep(pause_s * chance.random())
file.Close()
if rank == 0:
    with open(path, "rb") as whole:
        records = [whole.read(8) for _ in range(steps * size)] + [whole.read()]
    in_order = sorted(records[:-1], key=lambda record: struct.unpack("<II", record)) + records[-1:]
    print(f"answer {hashlib.blake2b(b''.join(in_order), digest_size=8).hexdigest()}", flush=True)
