"""Programs in C of random steps get what a real MPI gives them, through stops at random moments under other MPIs."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from remesh.carried.mpi.mpis import find_mpi
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from remesh.foundation.errors import ConfigError
from tests.mpi.conftest import PROGRAMS, Job, stop_after
from tests.mpi.patience import run_patiently
from tests.mpi.random_programs import write_program

pytestmark = pytest.mark.mpi
_LINE = re.compile(r"^rank \d+ step \d+ \w+ [0-9a-f]{16}$", re.MULTILINE)


def _compiled(seed: int, steps: int, folder: Path) -> tuple[Path, Path]:
    """The program, and the folder of the MPI that it was compiled against."""
    try:
        place = Path(find_mpi("mpich").launcher).parents[1]
    except ConfigError as error:
        pytest.skip(str(error))
    if shutil.which("cc") is None:
        pytest.skip("needs cc")
    source, program = folder / f"random-{seed}.c", folder / f"random-{seed}"
    source.write_text(write_program(seed, steps))
    options = (
        "-O1",
        "-Wall",
        "-Werror",
        "-Wno-unused-function",
        "-I",
        str(PROGRAMS / "c"),
        "-I",
        str(place / "include"),
    )
    library = (f"-L{place / 'lib'}", "-l:libmpi.so.12")
    subprocess.run(["cc", *options, str(source), "-o", str(program), *library], check=True)
    return program, place


def _native(program: Path, place: Path, num_ranks: int, folder: Path) -> list[str]:
    folder.mkdir()
    command = [str(place / "bin" / "mpiexec"), "-n", str(num_ranks), "env", f"LD_LIBRARY_PATH={place / 'lib'}"]
    done = run_patiently([*command, str(program)], dict(os.environ), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(_LINE.findall(done.stdout))


def _carried(job: Job, dice: random.Random, most_s: float) -> list[str]:
    checkpoint = None
    for mpi in dice.sample(("mpich", "openmpi", "impi"), 3):
        stay = job.stay(mpi, checkpoint=checkpoint, watch=stop_after(dice.uniform(0.05, most_s)))
        if stay.outcome.state == "finished":
            break
        assert stay.outcome.state == "stopped", job.events
        checkpoint = job.folder.checkpoint(None)
    else:
        assert job.stay("openmpi", checkpoint=checkpoint).outcome.state == "finished", job.events
    assert checkpoint is not None, "it ended before it was stopped at all"
    return sorted(line for log in job.folder.logs.glob("rank-*.out") for line in _LINE.findall(log.read_text()))


@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        pytest.param(1, 60, marks=pytest.mark.slow),
        *(pytest.param(seed, 400, marks=pytest.mark.long) for seed in range(2, 12)),
    ],
)
def test_a_random_program_gets_what_a_real_mpi_gives(job: Job, tmp_path: Path, seed: int, steps: int) -> None:
    dice = random.Random(f"carry {seed}")
    num_ranks = dice.randrange(2, 5)
    program, place = _compiled(seed, steps, tmp_path)
    native = _native(program, place, num_ranks, tmp_path / "native")
    assert len(native) == steps * num_ranks
    carried = tmp_path / "carried"
    carried.mkdir()
    environment = {"PATH": os.environ["PATH"], **job.gated}
    job.folder = JobFolder.create(
        tmp_path / "job", JobSpec((str(program), "40000"), num_ranks, str(carried), environment)
    )
    assert _carried(job, dice, 0.015 * steps) == native
