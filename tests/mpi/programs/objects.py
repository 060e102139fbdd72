"""Makes and uses many communicators, and once it runs on another MPI tells how long two more uses of each took."""

import sys
import time

from mpi4py import MPI

comm = MPI.COMM_WORLD
communicators = [comm.Dup() for _ in range(int(sys.argv[1]))]
datatypes = [MPI.INT.Create_vector(2, 1, 3).Commit() for _ in communicators]
for each in communicators:
    each.Barrier()
version = MPI.Get_library_version()
if comm.Get_rank() == 0:
    print("there", flush=True)
while not comm.allreduce(int(MPI.Get_library_version() != version), op=MPI.MAX):
    time.sleep(0.01)
for name in ("first", "second"):
    begin_s = time.perf_counter()
    for each in communicators:
        each.Barrier()
    if comm.Get_rank() == 0:
        print(name, time.perf_counter() - begin_s, flush=True)
