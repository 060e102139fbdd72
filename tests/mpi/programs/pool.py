"""A pool of workers by mpi4py.futures: the caller is rank 0, the others serve it."""

import sys
import time

from mpi4py.futures import MPICommExecutor


def work(task: tuple[int, float]) -> int:
    number, pause_s = task
    if pause_s:
        time.sleep(pause_s)
    return pow(3, number, 1_000_003) * number


def main(tasks: int, pause_s: float) -> None:
    with MPICommExecutor() as executor:
        if executor is not None:
            results = executor.map(work, [(number, pause_s) for number in range(tasks)])
            print("answer", sum(results) % 1_000_000_007, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
