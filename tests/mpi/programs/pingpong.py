"""How long small calls and large messages take, as a program sees it: lines of ``name value``, in s and bytes/s."""

import array
import statistics
import sys
import time

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.Get_rank()


def time_of(call, repeat: int, batches: int = 9) -> float:
    """Median over batches of the time of one call."""
    found = []
    for _ in range(batches):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        found.append((time.perf_counter() - start) / repeat)
    return statistics.median(found)


def ping(buffer) -> None:
    if rank == 0:
        comm.Send(buffer, 1)
        comm.Recv(buffer, 1)
    elif rank == 1:
        comm.Recv(buffer, 0)
        comm.Send(buffer, 0)


def work(total_s: float, call_every_s: float) -> float:
    """Compute with a call from time to time; how long it took in all."""
    one, result = array.array("d", [1.0]), array.array("d", [0.0])
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(int(total_s / call_every_s)):
        # A fixed amount of work, not of time: what the call costs must not shorten it.
        for _ in range(work_units):
            pass
        comm.Allreduce(one, result)
    return time.perf_counter() - start


repeat = int(sys.argv[1])
small, one, result = bytearray(8), array.array("d", [1.0]), array.array("d", [0.0])
latency = time_of(lambda: ping(small), repeat) / 2
allreduce = time_of(lambda: comm.Allreduce(one, result), repeat)
bandwidths = {}
for mib in (1, 8, 64):
    buffer = bytearray(mib << 20)
    bandwidths[mib] = (mib << 20) / (time_of(lambda: ping(buffer), max(repeat // (100 * mib), 3), 5) / 2)  # noqa: B023
probe = time.perf_counter()
for _ in range(1_000_000):
    pass
work_units = comm.bcast(int(1_000_000 * 1e-3 / (time.perf_counter() - probe)))
worked = statistics.median(work(0.5, 1e-3) for _ in range(5))
if rank == 0:
    print("latency", latency)
    print("allreduce", allreduce)
    for mib, value in bandwidths.items():
        print(f"bandwidth-{mib}", value)
    print("units", work_units)
    print("worked", worked / int(0.5 / 1e-3) / work_units, flush=True)
