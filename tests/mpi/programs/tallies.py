"""Each rank counts in a file as fast as it can, with no word to the others; ``FILE ENOUGH``, until ENOUGH is there.

A count stands in several places of the file, with those of other ranks between them. It is read and compared with what
the rank has in mind before it is raised: what is half written, lost or written twice ends the program.
"""

import os
import sys
from array import array

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
path, enough = sys.argv[1:]
num_places = 5
file = MPI.File.Open(comm, path, MPI.MODE_CREATE | MPI.MODE_RDWR)
file.Set_view(8 * rank, MPI.INT64_T, MPI.INT64_T.Create_resized(0, 8 * size).Commit())
expected, found = array("q", [0] * num_places), array("q", [0] * num_places)
file.Write_at(0, expected)
count = 0
while count % 100 or not os.path.exists(enough):
    file.Seek(0)
    if count % 2:
        file.Read(found)
    else:
        file.Read_at(0, [found, MPI.INT64_T])
    if found != expected:
        raise AssertionError(f"rank {rank} found {found.tolist()}, expected {expected.tolist()}")
    count += 1
    expected = array("q", [count] * num_places)
    if count % 3:
        file.Write_at(0, expected)
    else:
        file.Seek(0)
        file.Write([expected, MPI.INT64_T])
file.Close()
least = comm.reduce(count, MPI.MIN)
if rank == 0:
    print(f"answer {'every rank counted' if least else 'a rank has not counted'}", flush=True)
