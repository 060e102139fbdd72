"""A master gives out tasks and takes answers from anybody; the sum does not depend on who did what."""

import sys
import time

from gate import wait_at_gate
from mpi4py import MPI

WORK, DONE = 1, 2


def solve(task: int) -> int:
    value = task
    for _ in range(200):
        value = (value * 1_103_515_245 + 12_345) % (1 << 31)
    return value


def main(tasks: int, pause_s: float) -> None:
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    if rank == 0:
        total, given, status = 0, 0, MPI.Status()
        for worker in range(1, size):
            comm.send(given, dest=worker, tag=WORK)
            given += 1
        for number in range(tasks):
            if number == tasks - 1:
                wait_at_gate()
            task, value = comm.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
            total = (total + value * (task + 1)) % 1_000_000_007
            more = given < tasks
            comm.send(given if more else None, dest=status.Get_source(), tag=WORK if more else DONE)
            given += more
        print("answer", total, flush=True)
    else:
        while (task := comm.recv(source=0)) is not None:
            if pause_s:
                time.sleep(pause_s)
            comm.send((task, solve(task)), dest=0)
    comm.Barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
