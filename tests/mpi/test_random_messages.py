"""A C program of random messages, in all of MPI's ways to send, receive and complete, is carried from MPI to MPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from remesh.carried.mpi.library.build import BUILT, HERE as LIBRARY, LIBRARIES
from tests.mpi.conftest import Job, stop_after
from tests.mpi.random_messages import PROGRAM, expected_lines
from tests.unit.carried.mpi.library.building import has_compiler

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def _compile(face: str, folder: Path) -> Path:
    """The program as its maker would have linked it: it names the library, not where it is."""
    if not has_compiler() or not (BUILT / LIBRARIES[face]).exists():
        pytest.skip("no C compiler (cc) on PATH")
    subprocess.run([sys.executable, str(LIBRARY / "generate.py"), face, str(folder)], check=True)
    target = folder / "random_messages"
    names = ("-I", str(folder), "-I", str(LIBRARY), f"-L{BUILT}", f"-l:{LIBRARIES[face]}")
    subprocess.run(["cc", "-O1", *map(str, PROGRAM), *names, "-o", str(target), "-pthread"], check=True)
    return target


@pytest.mark.parametrize(
    ("face", "seed", "num_ranks", "stays"),
    [
        ("mpich", 1, 3, ("openmpi", "mpich", "impi")),
        ("openmpi", 2, 2, ("mpich", "impi", "openmpi")),
        ("abi", 3, 4, ("impi", "openmpi", "mpich")),
    ],
)
def test_random_messages_go_on_under_other_mpis(
    job: Job, tmp_path: Path, face: str, seed: int, num_ranks: int, stays: tuple[str, ...]
) -> None:
    steps = 80
    program = _compile(face, tmp_path)
    job.create(program, seed, steps, 40000, num_ranks=num_ranks, REMESH_UPPER="library")
    checkpoint = None
    for mpi in stays[:-1]:
        stopped = job.stay(mpi, checkpoint=checkpoint, watch=stop_after(0.4))
        assert stopped.outcome.state == "stopped", job.events
        checkpoint = job.folder.checkpoint(None)
    ended = job.stay(stays[-1], checkpoint=checkpoint)
    assert ended.outcome.state == "finished", job.events
    printed = [line for log in sorted(job.folder.logs.glob("rank-*.out")) for line in log.read_text().splitlines()]
    assert sorted(printed) == sorted([*expected_lines(seed, steps, num_ranks), f"answer {steps} steps"])
