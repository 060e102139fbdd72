"""What must fail with a parallel file, and does so on all ranks where they act together. ``file_errors.py FOLDER``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
RANK = WORLD.rank
CREATE = MPI.MODE_CREATE | MPI.MODE_RDWR
num_seen = 0


def expect(error_class: int, call: Callable[[], object], words: str = "") -> None:
    """The call fails with this class, and says these words."""
    global num_seen
    try:
        call()
    except MPI.Exception as error:
        assert error.Get_error_class() == error_class, (error, MPI.Get_error_string(error_class))
        assert words in str(error), error
        num_seen += 1
    else:
        raise AssertionError(f"no failure, expected {MPI.Get_error_string(error_class)}")


def opening(path: str) -> None:
    """One rank that cannot open is enough."""
    there = MPI.File.Open(WORLD, path, CREATE)
    there.Close()
    mine = f"{path}.none" if RANK == 1 else path
    expect(MPI.ERR_NO_SUCH_FILE, lambda: MPI.File.Open(WORLD, mine, MPI.MODE_RDWR), "(rank 1)")
    expect(MPI.ERR_NO_SUCH_FILE, lambda: MPI.File.Open(WORLD, f"{path}.none", MPI.MODE_RDWR), "(rank 0)")
    expect(MPI.ERR_FILE_EXISTS, lambda: MPI.File.Open(WORLD, path, CREATE | MPI.MODE_EXCL))
    expect(MPI.ERR_BAD_FILE, lambda: MPI.File.Open(WORLD, os.path.dirname(path)))
    expect(MPI.ERR_BAD_FILE, lambda: MPI.File.Open(WORLD, os.path.join(path, "in-a-file")))
    expect(MPI.ERR_NOT_SAME, lambda: MPI.File.Open(WORLD, path, CREATE if RANK else MPI.MODE_RDONLY))
    for amode in (0, MPI.MODE_RDONLY | MPI.MODE_WRONLY, MPI.MODE_RDONLY | MPI.MODE_CREATE):
        expect(MPI.ERR_AMODE, lambda amode=amode: MPI.File.Open(WORLD, path, amode))
    expect(MPI.ERR_AMODE, lambda: MPI.File.Open(WORLD, path, MPI.MODE_RDWR | MPI.MODE_SEQUENTIAL))
    expect(MPI.ERR_NO_SUCH_FILE, lambda: MPI.File.Delete(f"{path}.none"))


def full() -> None:
    """A device without room fails for one rank; all hear of it, in every collective form."""
    file = MPI.File.Open(WORLD, "/dev/full", MPI.MODE_WRONLY)
    mine = b"data" if RANK == 1 else b""
    expect(MPI.ERR_NO_SPACE, lambda: file.Write_at_all(0, mine), "(rank 1)")
    expect(MPI.ERR_NO_SPACE, lambda: file.Write_ordered(mine), "(rank 1)")
    file.Write_all_begin(mine)
    expect(MPI.ERR_NO_SPACE, lambda: file.Write_all_end(mine), "(rank 1)")
    if RANK == 1:
        expect(MPI.ERR_NO_SPACE, lambda: file.Write(mine))
        expect(MPI.ERR_NO_SPACE, lambda: file.Iwrite_at(0, mine))
    file.Close()


def access(path: str) -> None:
    """What the mode, the view or the state of a file does not allow."""
    file = MPI.File.Open(WORLD, path, MPI.MODE_RDONLY)
    expect(MPI.ERR_READ_ONLY, lambda: file.Write_at_all(0, b"x"))
    expect(MPI.ERR_READ_ONLY, lambda: file.Set_size(10))
    file.Close()
    expect(MPI.ERR_FILE, file.Get_size)
    file = MPI.File.Open(WORLD, path, MPI.MODE_WRONLY | MPI.MODE_SEQUENTIAL)
    expect(MPI.ERR_ACCESS, lambda: file.Read_ordered(bytearray(1)))
    expect(MPI.ERR_UNSUPPORTED_OPERATION, lambda: file.Write_at_all(0, b"x"))
    expect(MPI.ERR_UNSUPPORTED_OPERATION, lambda: file.Seek(0))
    file.Write_ordered(b"ab")
    file.Set_view(MPI.DISPLACEMENT_CURRENT)
    assert file.Get_view()[0] == 2 * WORLD.size
    file.Close()
    file = MPI.File.Open(WORLD, path, CREATE)
    expect(MPI.ERR_UNSUPPORTED_DATAREP, lambda: file.Set_view(0, MPI.INT, datarep="external32"))
    expect(MPI.ERR_ARG, lambda: file.Set_view(-1 if RANK else 0))
    expect(MPI.ERR_ARG, lambda: file.Set_view(0, MPI.INT, MPI.SHORT))
    expect(MPI.ERR_NOT_SAME, lambda: file.Set_size(RANK))
    expect(MPI.ERR_ARG, lambda: file.Seek(-1))
    expect(MPI.ERR_ARG, lambda: file.Read_at(-1, bytearray(1)))
    file.Set_view(0, MPI.INT)
    expect(MPI.ERR_ARG, lambda: file.Write_all(b"123" if RANK == 2 else b"1234"), "(rank 2)")
    split(file)
    file.Close()


def split(file: MPI.File) -> None:
    """Split collectives: one for each file, ended by its own end."""
    expect(MPI.ERR_IO, lambda: file.Write_all_end(b""))
    file.Seek(0)
    file.Write_all_begin(bytes(4))
    expect(MPI.ERR_IO, lambda: file.Read_all_begin(bytearray(4)))
    expect(MPI.ERR_IO, lambda: file.Write_at_all_end(bytes(4)))
    expect(MPI.ERR_IO, file.Close)
    file.Write_all_end(bytes(4))


def main(folder: str) -> None:
    """All of it."""
    path = os.path.join(folder, "file")
    opening(path)
    full()
    access(path)
    print(f"rank {RANK} saw {num_seen}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
