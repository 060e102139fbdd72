"""Long messages that nobody ever receives: their senders give them up and end, as some programs do."""

from mpi4py import MPI

comm = MPI.COMM_WORLD
for length in (40_000, 300_000, 3 << 20):
    comm.Isend(bytearray(length), (comm.rank + 1) % comm.size, 3).Free()
comm.Barrier()
if comm.rank == 0:
    print("answer left", flush=True)
