"""Arrays in memory that both halves share: a dumb model beside the allocator, and what an image finds in the file."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from remesh.carried.images.look.pagemap import file_pages
from remesh.carried.mpi.arena import ADDRESS, SIZE_BYTES, Arena
from remesh.carried.mpi.library.build import ARENA, BUILT
from remesh.foundation.linux.proc_text import Area

_PAGE = 4096

_PROGRAM = """
    import os, random, sys
    import numpy as np
    import ctypes

    address, num_bytes = 0x2000_0000_0000, 64 << 20
    told = (ctypes.c_uint64 * 2)()

    def is_shared(array):
        return address <= array.ctypes.data < address + num_bytes

    def used():
        ctypes.CDLL(None).remesh_arena_bytes(told)
        return told[0] - before

    before = 0
    before = used()
    # Large ones are shared, small ones and those that find no room are not.
    large, small, huge = np.ones(100_000), np.ones(100), np.ones(16 << 20)
    assert is_shared(large) and not is_shared(small) and not is_shared(huge) and used() == 802_816
    # Those of less than a huge page stand on one together.
    near = np.ones(100_000)
    assert near.ctypes.data >> 21 == large.ctypes.data >> 21 and near.ctypes.data != large.ctypes.data
    # What stands there survives growing, in the arena or out of it.
    grown = np.arange(50_000)
    grown.resize(200_000, refcheck=False)
    assert (grown[:50_000] == np.arange(50_000)).all() and not grown[50_000:].any()
    # A child has its own; so has the parent.
    pid = os.fork()
    if pid == 0:
        same = bool((large == 1).all())
        large[:] = 2
        fresh = np.zeros(100_000)
        os._exit(0 if same and is_shared(fresh) and not fresh.any() and (large == 2).all() else 1)
    assert os.waitpid(pid, 0)[1] == 0 and (large == 1).all()
    del large, near, grown, small, huge
    assert used() == 0
    # No two arrays meet, and zeros are zeros, whatever stood there before.
    chance, living = random.Random(5), {}
    for number in range(3000):
        if living and chance.random() < 0.5:
            key = chance.choice(list(living))
            assert (living.pop(key) == key % 251).all()
            continue
        array = (np.zeros if number % 2 else np.empty)(chance.randrange(60_000, 900_000), dtype=np.uint8)
        assert not number % 2 or not array.any()
        array[:] = number % 251
        living[number] = array
    assert all((array == number % 251).all() for number, array in living.items())
    del array
    living.clear()
    assert used() == 0
"""


def _environment(folder: Path) -> dict[str, str]:
    """Of a program whose channel is in this folder, with the arena beside it."""
    return {"PATH": os.environ["PATH"], "LD_PRELOAD": str(BUILT / ARENA), "REMESH_CHANNEL": str(folder / "channel")}


@pytest.mark.procs
def test_arrays_in_the_arena_keep_what_is_theirs(tmp_path: Path) -> None:
    (tmp_path / "arena").touch()
    os.truncate(tmp_path / "arena", 64 << 20)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM)], env=_environment(tmp_path), capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


_ZEROS = """
    import os, sys
    import numpy as np

    address, num_bytes = 0x2000_0000_0000, 256 << 20
    ones = np.ones(10_000_000)  # more than is kept for the next
    del ones
    zeros = np.zeros(10_000_000)
    assert address <= zeros.ctypes.data < address + num_bytes and not zeros.any()
"""


@pytest.mark.procs
def test_zeros_are_zeros_where_files_have_no_holes(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system without holes (ramfs)")
    within = 'mount -t ramfs none "$0" && truncate -s 256M "$0/arena" && exec env "$@"'
    variables = [f"{name}={value}" for name, value in _environment(tmp_path).items()]
    program = [*variables, sys.executable, "-c", textwrap.dedent(_ZEROS)]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", within, str(tmp_path), *program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_view_is_given_of_what_stands_in_the_arena_and_of_nothing_else(tmp_path: Path) -> None:
    arena = Arena.__new__(Arena)
    arena._whole = memoryview(bytearray(0))
    assert arena.view(ADDRESS - 1, 10) is None
    assert arena.view(ADDRESS + SIZE_BYTES - 5, 6) is None
    assert arena.view(0, 10) is None


def test_an_image_holds_the_pages_that_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    with path.open("wb") as file:
        file.truncate(1 << 30)
        for page in (3, 4, 1000):
            os.pwrite(file.fileno(), b"x", page * _PAGE)
    area = Area(ADDRESS, ADDRESS + (1 << 30), "rw-s", 0, "00:00", 0, str(path))
    found = [((some.start - ADDRESS) // _PAGE, (some.end - ADDRESS) // _PAGE) for some in file_pages(os.getpid(), area)]
    pages = {page for start, end in found for page in range(start, end)}
    # A file system may keep more around them.
    assert {3, 4, 1000} <= pages and len(pages) < 100
