"""Programs of MPI's C++ bindings are carried, on the C++ library of the MPI that they were compiled against."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from tests.mpi.conftest import PROGRAMS, Job, stop_after
from tests.mpi.debian import ROOT, libraries
from tests.mpi.fortran import variables

pytestmark = pytest.mark.mpi
_HEADERS = {
    "mpich": ROOT / "usr/include/x86_64-linux-gnu/mpich",
    "openmpi": ROOT / "usr/lib/x86_64-linux-gnu/openmpi/include",
}
_LIBRARIES = {"mpich": ("libmpichcxx.so.12", "libmpich.so.12"), "openmpi": ("libmpi_cxx.so.40", "libmpi.so.40")}


@pytest.mark.parametrize("face", [pytest.param("mpich", marks=pytest.mark.slow), "openmpi"])
def test_operations_exceptions_and_handlers_of_cxx_go_on_under_other_mpis(job: Job, tmp_path: Path, face: str) -> None:
    """The program checks itself in each step; it answers what it answers when nobody stops it."""
    program, steps, dice = _compiled(face, tmp_path), 200, random.Random(face)
    answers = []
    for chain in ((), dice.sample(("mpich", "openmpi", "impi"), 3)):
        argv = (str(program), str(steps), "10000" if chain else "0")
        spec = JobSpec(argv, 3, str(tmp_path), variables() | job.gated)
        job.folder = JobFolder.create(tmp_path / f"job-{len(chain)}", spec)
        checkpoint = None
        for mpi in chain:
            stay = job.stay(mpi, checkpoint=checkpoint, watch=stop_after(dice.uniform(0.05, 0.5)))
            assert stay.outcome.state == "stopped", job.events
            checkpoint = job.folder.checkpoint(None)
        assert job.stay("mpich", checkpoint=checkpoint).outcome.state == "finished", job.events
        answers.append(job.answer)
    assert answers[0] is not None and answers[0] == answers[1]


def _compiled(face: str, into: Path) -> Path:
    if shutil.which("g++") is None or not (_HEADERS[face] / "mpi.h").exists():
        pytest.skip(f"no g++, or no headers of {face}: fetch Debian's with `make mpi-programs`")
    program = into / f"bindings-{face}"
    names = [f"-l:{name}" for name in _LIBRARIES[face]]
    folders = [f"-L{folder}" for folder in libraries()]
    fixed = ["-O1", "-w", "-std=c++14", "-Wl,--allow-shlib-undefined", "-Wl,--no-as-needed", f"-I{_HEADERS[face]}"]
    source = PROGRAMS / "cxx" / "bindings.cpp"
    subprocess.run(["g++", *fixed, str(source), "-o", str(program), *folders, *names], check=True, env=variables())
    return program
