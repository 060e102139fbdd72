"""All ranks book into one ledger under its lock, and whoever has the lock sleeps with it: the others wait for it."""

import array
import sys
import time

from gate import wait_at_gate
from mpi4py import MPI


def main(bookings: int, pause_s: float) -> None:
    comm = MPI.COMM_WORLD
    ledger = MPI.Win.Allocate(16 if comm.rank == 0 else 0, 8, comm=comm)
    page = array.array("q", [0, 0])
    for number in range(bookings):
        ledger.Lock(0, MPI.LOCK_EXCLUSIVE)
        ledger.Get(page, 0)
        ledger.Flush(0)
        if comm.rank == 0 and number == bookings // 2:
            wait_at_gate()
        time.sleep(pause_s)
        # Right only if nobody else has booked meanwhile.
        page[0] += 1
        page[1] += comm.rank * 1000 + number
        ledger.Put(page, 0)
        ledger.Unlock(0)
    comm.Barrier()
    if comm.rank == 0:
        print("answer", *ledger.tomemory().cast("q"), flush=True)
    ledger.Free()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
