"""A long message whose request its sender has freed is received when the sender is in MPI_Finalize.

Rank 2 has sent nothing and need not wait for it. Files in the folder of the program say how far the others are: they
may use MPI no more.
"""

import os
import time
from pathlib import Path

import numpy as np
from gate import wait_at_gate
from mpi4py import MPI

comm, rank = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
LENGTH = 200_000
numbers = np.arange(2 * LENGTH, dtype="i4")

if rank:
    if rank == 1:
        # What MPI packs is in memory of its own.
        every_other = MPI.INT32_T.Create_vector(LENGTH, 1, 2).Commit()
        comm.Isend([numbers, 1, every_other], 0, 3).Free()
    Path(f"ends.{rank}").touch()
    MPI.Finalize()
    Path(f"ended.{rank}").touch()
else:
    while not os.path.exists("ended.2"):
        time.sleep(0.01)
    wait_at_gate()
    came = np.zeros(LENGTH, dtype="i4")
    assert not os.path.exists("ended.1"), "the data have gone with their sender"
    comm.Recv(came, 1, 3)
    print("answer", np.array_equal(came, numbers[::2]), flush=True)
