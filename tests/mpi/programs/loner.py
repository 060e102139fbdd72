"""Holds a socket of its own for a while, which no image can carry."""

import socket
import sys
import time

from mpi4py import MPI


def main(steps: int, pause_s: float) -> None:
    comm = MPI.COMM_WORLD
    listener = socket.socket() if comm.Get_rank() == 1 else None
    if listener is not None:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
    total = 0
    for step in range(steps):
        total += comm.allreduce(step)
        time.sleep(pause_s)
    if comm.Get_rank() == 0:
        print("answer", total, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
