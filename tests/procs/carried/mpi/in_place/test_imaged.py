"""A process that has dropped its lower half is an ordinary one: it is imaged, restored, and loads another one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from remesh.carried.mpi.in_place.halves import HERE as SOURCES, UPPER, build_lower, compile_program
from tests.procs.stage import WAIT_FOR_GO, Stage

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.procs,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) on PATH"),
]


def test_a_program_in_python_with_threads_has_a_lower_half_before_and_after_an_image(
    stage: Stage, tmp_path: Path
) -> None:
    upper = [HERE / "plain_library.c", *(SOURCES / name for name in UPPER)]
    library = compile_program(tmp_path / "libplain.so", "-shared", "-fPIC", *upper)
    lower = build_lower(tmp_path / "lower_plain", HERE / "lower_plain.c")
    program = f"""
import ctypes, signal
import numpy as np
halves = ctypes.CDLL({str(library)!r})
halves.begin.restype = halves.end.restype = ctypes.c_char_p
state = np.random.default_rng(1).random((300, 300))
state = np.sin(state @ state)  # threads of its own, before there is a lower half
caught = []
signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
def stay():
    assert halves.begin({str(lower)!r}.encode()) is None
    counts = [halves.count() for _ in range(3)]
    threads = [threading.Thread(target=lambda: counts.append(halves.count())) for _ in range(3)]
    for thread in threads: thread.start(); thread.join()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert halves.end() is None
    print(counts, caught, flush=True)
stay()
{WAIT_FOR_GO}
stay()
"""
    # What was said before the image is not said again; the signal of the first stay is remembered.
    assert stage.finish(stage.restore(stage.image_of(program))) == "[1, 2, 3, 1, 2, 3] [10, 10]\n"
