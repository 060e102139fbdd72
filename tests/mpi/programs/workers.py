"""Each rank has a pool of processes that compute for it; the results are summed over all ranks."""

import multiprocessing
import sys
import time

from gate import wait_at_gate
from mpi4py import MPI


def work(task: tuple[int, float]) -> int:
    number, pause_s = task
    time.sleep(pause_s)
    return pow(3, number, 1_000_003) * number


def main(rounds: int, pause_s: float) -> None:
    comm, total = MPI.COMM_WORLD, 0
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for number in range(rounds):
            if comm.rank == 0 and number == rounds - 1:
                wait_at_gate()
            results = pool.map_async(work, [(100 * comm.rank + 10 * number + each, pause_s) for each in range(6)])
            total += comm.allreduce(sum(results.get()))
    if comm.rank == 0:
        print("answer", total % 1_000_000_007, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
