"""A walk through parallel files: prints one checksum per rank, the same on a real MPI and on the library.

``files.py STEPS PAUSE [FOLDER]``; the ranks, four of them or any other number, share the folder, by default the one in
which they were started. They pause while files are open. Rank 0 also prints the answer, of all ranks.
"""

from __future__ import annotations

import array
import os
import sys
import time
import zlib
from collections.abc import Callable

from gate import wait_at_gate
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
CREATE = MPI.MODE_CREATE | MPI.MODE_RDWR
CLASSES = {
    getattr(MPI, name): name
    for name in ("ERR_NO_SUCH_FILE", "ERR_AMODE", "ERR_FILE_EXISTS", "ERR_READ_ONLY", "ERR_ACCESS")
}
seen = 0


def see(*things: object) -> None:
    """Put what came out into the checksum."""
    global seen
    for thing in things:
        seen = zlib.crc32(thing if isinstance(thing, bytes) else repr(thing).encode(), seen)


def failure(call: Callable[[], object]) -> str:
    """Name of the class with which a call fails; ROMIO tells it to the first rank only."""
    try:
        call()
    except MPI.Exception as error:
        return CLASSES.get(error.Get_error_class(), str(error)) if RANK == 0 else "a failure"
    return "no failure"


def content(path: str) -> bytes:
    """The whole file, once all have written."""
    WORLD.Barrier()
    with open(path, "rb") as file:
        data = file.read()
    WORLD.Barrier()
    return data


def numbers(num: int, first: int) -> array.array:
    """So many integers."""
    return array.array("i", range(first, first + num))


def blocks(path: str, step: int, pause_s: float) -> None:
    """Explicit offsets in all forms, and statuses."""
    file, status = MPI.File.Open(WORLD, path, CREATE), MPI.Status()
    file.Set_size(0)
    num = 5 + step
    file.Write_at_all(4 * num * RANK, numbers(num, 100 * RANK + step), status)
    see(status.Get_count(MPI.INT), status.Get_elements(MPI.INT))
    file.Write_at(4 * num * (SIZE + RANK), numbers(num, 7 * RANK))
    time.sleep(pause_s)
    file.Iwrite_at(4 * num * (2 * SIZE + RANK), numbers(num, 9 * RANK)).Wait()
    file.Sync()
    WORLD.Barrier()
    file.Sync()
    into = array.array("i", [-1] * (num + 3))
    file.Read_at_all(4 * num * ((RANK + 1) % SIZE), [into, num, MPI.INT], status)
    see(into.tobytes(), status.Get_count(MPI.INT))
    request = file.Iread_at(4 * num * (2 * SIZE + (RANK + 1) % SIZE), [into, num, MPI.INT])
    request.Wait(status)
    see(into.tobytes(), status.Get_count(MPI.INT), file.Get_size())
    # Behind the end there is nothing, and at the end less than was asked for.
    last = array.array("i", [-1] * (num + 3))
    file.Read_at(4 * num * (3 * SIZE - 1), last, status)
    see(last.tobytes(), status.Get_count(MPI.INT))
    file.Read_at(file.Get_size() + 400, last, status)
    see(last.tobytes(), status.Get_count(MPI.INT))
    file.Seek(-8, MPI.SEEK_END)
    file.Read([last, 2, MPI.INT])
    see(last.tobytes(), file.Get_position())
    file.Close()
    see(content(path))


def views(path: str, step: int, pause_s: float) -> None:
    """Interleaved and strided views, individual pointers, split collectives, a matrix by columns of blocks."""
    file, status = MPI.File.Open(WORLD, path, CREATE), MPI.Status()
    tile = MPI.INT.Create_vector(3, 2, 2 * SIZE).Create_resized(0, 4 * 6 * SIZE).Commit()
    file.Set_view(16 + 8 * RANK, MPI.INT, tile)
    see(file.Get_view()[0], file.Get_byte_offset(7), file.Get_position())
    file.Write_all(numbers(9, 1000 * RANK + step))
    see(file.Get_position())
    file.Write_all_begin(mine := numbers(7, 50 * RANK))
    time.sleep(pause_s)
    file.Write_all_end(mine, status)
    see(status.Get_count(MPI.INT), file.Get_position())
    file.Seek(-3, MPI.SEEK_CUR)
    file.Iwrite(numbers(2, -9)).Wait()
    file.Sync()
    WORLD.Barrier()
    file.Seek(4)
    into = array.array("i", [0] * 8)
    file.Read_all(into)
    see(into.tobytes(), file.Get_position())
    every_other = MPI.INT.Create_vector(4, 1, 2).Commit()
    file.Read_at_all(1, [into, 1, every_other], status)
    see(into.tobytes(), status.Get_elements(MPI.INT))
    file.Set_atomicity(True)
    file.Write(numbers(1, 77))
    file.Set_atomicity(False)
    file.Close()
    see(content(path))
    file = MPI.File.Open(WORLD, path, CREATE)
    box = MPI.DOUBLE.Create_subarray([6, 4 * SIZE], [6, 4], [0, 4 * RANK]).Commit()
    file.Set_view(0, MPI.DOUBLE, box)
    file.Write_all(array.array("d", [RANK + step / 7 + i for i in range(24)]))
    file.Set_view(0)
    file.Preallocate(6 * 4 * SIZE * 8 + 100)
    see(file.Get_size(), file.Get_position())
    file.Close()
    see(content(path))


def in_turn(path: str, step: int) -> None:
    """The shared pointer in order of ranks, and appending."""
    file = MPI.File.Open(WORLD, path, CREATE)
    file.Set_view(0, MPI.INT)
    for turn in range(3):
        file.Write_ordered(numbers(1 + (RANK + turn) % 3, 10 * RANK + turn))
    WORLD.Barrier()
    see(file.Get_position_shared())
    WORLD.Barrier()
    file.Seek_shared(2, MPI.SEEK_SET)
    into = array.array("i", [0] * 3)
    file.Read_ordered_begin([into, 1 + RANK % 2, MPI.INT])
    file.Read_ordered_end([into, 1 + RANK % 2, MPI.INT])
    WORLD.Barrier()
    see(into.tobytes(), file.Get_position_shared(), file.Get_size())
    file.Close()
    file = MPI.File.Open(WORLD, path, MPI.MODE_WRONLY | MPI.MODE_APPEND)
    see(file.Get_position())
    file.Write_ordered(numbers(2, step + RANK))
    file.Close()
    see(content(path))


def as_they_come(path: str, pause_s: float) -> None:
    """The shared pointer without order: every record stands somewhere, once, and is read by one rank."""
    file, num = MPI.File.Open(WORLD, path, CREATE), 10
    file.Set_view(4, MPI.INT)
    for record in range(num):
        mine = array.array("i", [RANK, record, RANK * record])
        if record % 2:
            file.Write_shared(mine)
        else:
            file.Iwrite_shared(mine).Wait()
        time.sleep(pause_s / num)
    file.Sync()
    WORLD.Barrier()
    see(file.Get_position_shared(), file.Get_size())
    WORLD.Barrier()
    file.Seek_shared(0, MPI.SEEK_SET)
    found, status = [], MPI.Status()
    for _ in range(num):
        into = array.array("i", [-1] * 3)
        file.Read_shared(into, status)
        found.append((into.tolist(), status.Get_count(MPI.INT)))
    see(sorted(record for some in WORLD.allgather(found) for record in some))
    file.Close()


def failures(path: str) -> None:
    """What cannot be opened fails on all ranks; what is there only on one, too."""
    see(failure(lambda: MPI.File.Open(WORLD, f"{path}.none", MPI.MODE_RDONLY)))
    see(failure(lambda: MPI.File.Open(WORLD, path, MPI.MODE_RDONLY | MPI.MODE_RDWR)))
    see(failure(lambda: MPI.File.Open(WORLD, path, CREATE | MPI.MODE_EXCL)))
    see(failure(lambda: MPI.File.Delete(f"{path}.none")))
    file = MPI.File.Open(WORLD, path, MPI.MODE_RDONLY)
    see(failure(lambda: file.Write_at(0, b"x")))
    file.Close()
    file = MPI.File.Open(WORLD, f"{path}.gone", CREATE | MPI.MODE_DELETE_ON_CLOSE)
    file.Close()
    WORLD.Barrier()
    see(os.path.exists(f"{path}.gone"))
    own = MPI.File.Open(MPI.COMM_SELF, f"{path}.{RANK}", CREATE | MPI.MODE_EXCL)
    own.Write(b"own")
    see(own.Get_size(), own.Get_group().size)
    own.Close()
    MPI.File.Delete(f"{path}.{RANK}")


def main(num_steps: int, pause_s: float, folder: str) -> None:
    """All of it, some times."""
    for step in range(num_steps):
        if RANK == 0 and step == num_steps - 1:
            wait_at_gate()
        path = os.path.join(folder, f"file-{step}")
        blocks(path, step, pause_s)
        views(path, step, pause_s)
        in_turn(f"{path}.turns", step)
        as_they_come(f"{path}.shared", pause_s)
        failures(path)
    print(f"rank {RANK} saw {seen}", flush=True)
    all_seen = WORLD.gather(seen)
    if RANK == 0:
        print(f"answer {zlib.crc32(repr(all_seen).encode())}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ".")
