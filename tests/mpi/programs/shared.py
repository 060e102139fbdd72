"""``shared.py ROUNDS PAUSE``: arrays of NumPy in memory that the ranks of a host share. Prints ``answer``, a checksum.

Each rank adds a row that follows from its rank and the round to a table; then all read the whole table.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from gate import wait_at_gate
from mpi4py import MPI


def main() -> None:
    """Print the answer on rank 0."""
    rounds, pause_s = int(sys.argv[1]), float(sys.argv[2])
    comm = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    columns = 5000
    window = MPI.Win.Allocate_shared(8 * columns, 8, comm=comm)
    # Parts stand one behind the other: from the first one on it is one table.
    first, unit = window.Shared_query(0)
    last, _ = window.Shared_query(comm.size - 1)
    assert unit == 8 and last.address - first.address == 8 * columns * (comm.size - 1)
    table = MPI.memory.fromaddress(first.address, 8 * columns * comm.size)
    whole = np.ndarray((comm.size, columns), "i8", buffer=table)
    checks = 0
    for turn in range(rounds):
        if comm.rank == 0 and turn == rounds - 1:
            wait_at_gate()
        whole[comm.rank] += np.arange(columns) * (turn + comm.rank)
        window.Fence()
        sums = whole.sum(axis=1)
        expected = [sum(range(columns)) * sum(t + rank for t in range(turn + 1)) for rank in range(comm.size)]
        assert sums.tolist() == expected, (turn, sums, expected)
        checks += int(sums.sum()) % 1009
        window.Fence()
        time.sleep(pause_s)
    if comm.rank == 0:
        print("answer", checks)
    window.Free()


main()
