"""A pool of mpipool, a package that knows nothing of us: the caller is rank 0, the others serve it."""

import sys
import time

from gate import wait_at_gate
from mpipool import MPIExecutor


def work(number: int, pause_s: float) -> int:
    if pause_s:
        time.sleep(pause_s)
    return pow(5, number, 1_000_003) * number


def main(tasks: int, pause_s: float) -> None:
    with MPIExecutor() as pool:
        pool.workers_exit()
        futures = [pool.submit(work, number, pause_s) for number in range(tasks - 1)]
        wait_at_gate()
        futures.append(pool.submit(work, tasks - 1, pause_s))
        print("answer", sum(future.result() for future in futures) % 1_000_000_007, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
