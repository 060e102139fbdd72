"""Processes that hold locks of files have them again after a restart, or do not come back."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Final

import pytest

from remesh.carried.images import NotImageable, dump_image
from remesh.foundation.errors import StorageError
from tests.procs.stage import WAIT_FOR_GO, Stage

pytestmark = pytest.mark.procs

_OFD_SETLK: Final = 37
_HOLDER: Final = f"""
import fcntl, struct
def make(name):
    file = open(name, "w+")
    file.write("x" * 100)
    file.flush()
    return file
whole, shared, ranges, of_file = map(make, ["whole", "shared", "ranges", "of_file"])
fcntl.flock(whole, fcntl.LOCK_EX)
also_whole = os.dup(whole.fileno())
fcntl.flock(shared, fcntl.LOCK_SH)
another = open("ranges")  # through which nothing can be locked for writing
fcntl.lockf(ranges, fcntl.LOCK_EX, 10, 5)
fcntl.lockf(ranges, fcntl.LOCK_SH, 0, 50)
fcntl.fcntl(of_file, {_OFD_SETLK}, struct.pack("hh4xqqi4x", fcntl.F_WRLCK, 0, 20, 10, 0))
child = os.fork()  # it inherits those of open files, and none of a process
{WAIT_FOR_GO}
if not child:
    os._exit(0)
os.waitpid(child, 0)
print("ended")
"""


def is_free(path: Path, kind: int, start: int | None = None) -> bool:
    """Whether a lock can be had, of a file or of a byte in it."""
    with path.open("r+") as file:
        try:
            if start is None:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            else:
                way = fcntl.F_WRLCK if kind == fcntl.LOCK_EX else fcntl.F_RDLCK
                fcntl.fcntl(file, _OFD_SETLK, struct.pack("hh4xqqi4x", way, 0, start, 1, 0))
        except OSError as error:
            assert error.errno in (errno.EAGAIN, errno.EACCES)
            return False
        return True


def what_is_free(work: Path) -> list[bool]:
    return [
        is_free(work / "whole", fcntl.LOCK_SH),
        is_free(work / "shared", fcntl.LOCK_EX),
        is_free(work / "shared", fcntl.LOCK_SH),
        *(is_free(work / "ranges", fcntl.LOCK_EX, start) for start in (4, 5, 14, 15, 49, 50, 1 << 40)),
        is_free(work / "ranges", fcntl.LOCK_SH, 5),
        is_free(work / "ranges", fcntl.LOCK_SH, 50),
        *(is_free(work / "of_file", fcntl.LOCK_EX, start) for start in (19, 20, 29, 30)),
    ]


def test_locks_of_files_are_held_again_after_a_restart(stage: Stage) -> None:
    upper = stage.start(_HOLDER)
    held = what_is_free(stage.work)
    assert held == [
        False,
        False,
        True,
        True,
        False,
        False,
        True,
        True,
        False,
        False,
        False,
        True,
        True,
        False,
        False,
        True,
    ]
    dump_image(upper.pid, stage.folder / "image")
    assert what_is_free(stage.work) == held
    upper.kill()
    assert all(what_is_free(stage.work))
    back = stage.restore(stage.folder / "image")
    assert what_is_free(stage.work) == held
    back.kill()
    assert all(what_is_free(stage.work))
    back = stage.restore(stage.folder / "image")
    (stage.work / "go").touch()
    assert stage.finish(back) == "ended\n"
    assert all(what_is_free(stage.work))


@pytest.mark.parametrize("name", ["whole", "ranges", "of_file"])
def test_a_program_does_not_come_back_beside_who_has_its_lock(stage: Stage, name: str) -> None:
    image = stage.image_of(_HOLDER)
    with (stage.work / name).open("r+") as file:
        if name == "whole":
            fcntl.flock(file, fcntl.LOCK_EX)
        else:
            fcntl.fcntl(file, _OFD_SETLK, struct.pack("hh4xqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
        with pytest.raises(StorageError, match=f"{name} again, .* another process has one now"):
            stage.restore(image)
    assert stage.finish(stage.restore(image)) == "ended\n"


def test_a_lease_is_refused_by_name(stage: Stage) -> None:
    lease = 'open("leased", "w").close()\nfile = open("leased")\nfcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)'
    upper = stage.start(f"import fcntl\n{lease}\n{WAIT_FOR_GO}")
    with pytest.raises(NotImageable, match="leased: it has a lease of its file"):
        dump_image(upper.pid, stage.folder / "image")
    os.kill(upper.pid, 0)
