"""A pool of workers by mpi4py.futures: the caller is rank 0, the others serve it."""

import sys
import time
from collections.abc import Iterator

from gate import wait_at_gate
from mpi4py.futures import MPICommExecutor


def work(task: tuple[int, float]) -> int:
    number, pause_s = task
    if pause_s:
        time.sleep(pause_s)
    return pow(3, number, 1_000_003) * number


def given(tasks: int, pause_s: float) -> Iterator[tuple[int, float]]:
    for number in range(tasks):
        if number == tasks - 1:
            wait_at_gate()
        yield number, pause_s


def main(tasks: int, pause_s: float) -> None:
    with MPICommExecutor() as executor:
        if executor is not None:
            results = executor.map(work, given(tasks, pause_s))
            print("answer", sum(results) % 1_000_000_007, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
