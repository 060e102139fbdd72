"""How long small calls and large messages take, as a program sees it: lines of ``name value``, in s and bytes/s.

``pingpong.py REPEAT [small] [large] [work] [copied] [alone] [window] [file] [row]``; the first three parts if none is
named. With REMESH_SHARED_ARRAYS=1 large messages are NumPy arrays, else bytearrays.
"""

import array
import os
import statistics
import sys
import tempfile
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


def make_buffer(num_bytes: int):
    if os.environ.get("REMESH_SHARED_ARRAYS") == "1":
        import numpy as np  # noqa: PLC0415 - the native run has none

        return np.zeros(num_bytes, dtype=np.uint8)
    return bytearray(num_bytes)


def measure_small(repeat: int) -> None:
    small, one, result = bytearray(8), array.array("d", [1.0]), array.array("d", [0.0])
    tell("latency", time_of(lambda: ping(small), repeat) / 2)
    tell("allreduce", time_of(lambda: comm.Allreduce(one, result), repeat))
    tell("iallreduce", time_of(lambda: comm.Iallreduce(one, result).Wait(), repeat))


def measure_alone(repeat: int) -> None:
    """A small call that no other rank has a part in."""
    one, result = array.array("d", [1.0]), array.array("d", [0.0])
    tell("alone", time_of(lambda: MPI.COMM_SELF.Allreduce(one, result), repeat))


def measure_large(repeat: int) -> None:
    for mib in (1, 8, 64):
        buffer = make_buffer(mib << 20)
        ping(buffer)
        took_s = time_of(lambda: ping(buffer), max(repeat // (25 * mib), 3), 5)  # noqa: B023
        tell(f"bandwidth-{mib}", (mib << 20) / (took_s / 2))


def measure_row(repeat: int) -> None:
    """Large messages in a row, all one way: a shaped link lets the first MiB after a pause through at any speed."""
    total_mib = 64
    for mib in (1, 8, 64):
        buffer = make_buffer(mib << 20)

        def send_row(buffer=buffer, mib: int = mib) -> None:
            for _ in range(total_mib // mib):
                if rank == 0:
                    comm.Send(buffer, 1)
                elif rank == 1:
                    comm.Recv(buffer, 0)
            # The last one has arrived when this has.
            ping(bytearray(0))

        send_row()
        tell(f"row-{mib}", (total_mib << 20) / time_of(send_row, max(repeat // 500, 1), 5))


def measure_copied(repeat: int) -> None:
    """What large messages reach that are copied once on each side, piece by piece while others are on their way."""
    pieces = [memoryview(bytearray(1 << 20)) for _ in range(4)]
    for mib in (1, 8, 64):
        buffer = memoryview(bytearray(mib << 20))

        def ping_pieces(buffer: memoryview = buffer, mib: int = mib) -> None:
            for sender in (0, 1):
                send_pieces(buffer, mib, pieces) if rank == sender else receive_pieces(buffer, mib, pieces)

        ping_pieces()
        took_s = time_of(ping_pieces, max(repeat // (25 * mib), 3), 5)
        tell(f"copied-{mib}", (mib << 20) / (took_s / 2))


def send_pieces(buffer: memoryview, num_pieces: int, pieces: list[memoryview]) -> None:
    requests: list[MPI.Request] = []
    for index in range(num_pieces):
        if index >= len(pieces):
            requests[index - len(pieces)].Wait()
        piece = pieces[index % len(pieces)]
        piece[:] = buffer[index << 20 : index + 1 << 20]
        requests.append(comm.Isend(piece, 1 - rank))
    MPI.Request.Waitall(requests)


def receive_pieces(buffer: memoryview, num_pieces: int, pieces: list[memoryview]) -> None:
    requests = [comm.Irecv(piece, 1 - rank) for piece in pieces[:num_pieces]]
    for index in range(num_pieces):
        requests[index].Wait()
        piece = pieces[index % len(pieces)]
        buffer[index << 20 : index + 1 << 20] = piece
        if index + len(pieces) < num_pieces:
            requests.append(comm.Irecv(piece, 1 - rank))


def measure_window(repeat: int) -> None:
    """The first rank raises a number of the second one, which waits meanwhile, and sees what it was."""
    window = MPI.Win.Allocate(8, 8, comm=comm)
    one, was = array.array("q", [1]), array.array("q", [0])

    def fetch_and_add() -> None:
        if rank == 0:
            window.Fetch_and_op(one, was, 1, 0, MPI.SUM)
            window.Flush(1)

    window.Lock_all()
    tell("fetched", time_of(fetch_and_add, repeat))
    comm.Barrier()
    window.Unlock_all()
    window.Free()


def measure_file(repeat: int) -> None:
    """Each rank writes a number of its own to one file, which is kept by the system."""
    folder = comm.bcast(tempfile.mkdtemp(prefix="pingpong-") if rank == 0 else None)
    amode = MPI.MODE_CREATE | MPI.MODE_WRONLY | MPI.MODE_DELETE_ON_CLOSE
    file = MPI.File.Open(comm, os.path.join(folder, "numbers"), amode)
    one = array.array("q", [rank])
    tell("written", time_of(lambda: file.Write_at(8 * rank, one), repeat))
    file.Close()
    if rank == 0:
        os.rmdir(folder)


def measure_work() -> None:
    """An iteration of about 1 ms of computing and one call, over the same without the call.

    Both in one process and in turns: how fast Python computes differs by several per cent from process to process.
    """
    one, result = array.array("d", [1.0]), array.array("d", [0.0])
    begin = time.perf_counter()
    for _ in range(1_000_000):
        pass
    num_units = comm.bcast(int(1_000_000 * 1e-3 / (time.perf_counter() - begin)))

    def compute() -> None:
        for _ in range(num_units):
            pass

    def compute_and_call() -> None:
        compute()
        comm.Allreduce(one, result)

    found = []
    for _ in range(75):
        alone_s, with_call_s = time_of(compute, 20, 1), time_of(compute_and_call, 20, 1)
        found.append(with_call_s / alone_s)
    tell("worked", statistics.median(found))


def tell(name: str, value: float) -> None:
    if rank == 0:
        print(name, value, flush=True)


parts = sys.argv[2:] or ["small", "large", "work"]
if "small" in parts:
    measure_small(int(sys.argv[1]))
if "large" in parts:
    measure_large(int(sys.argv[1]))
if "work" in parts:
    measure_work()
if "copied" in parts:
    measure_copied(int(sys.argv[1]))
if "alone" in parts:
    measure_alone(int(sys.argv[1]))
if "row" in parts:
    measure_row(int(sys.argv[1]))
if "window" in parts:
    measure_window(max(int(sys.argv[1]) // 5, 20))
if "file" in parts:
    measure_file(max(int(sys.argv[1]) // 5, 20))
