"""A program in C, in Fortran and in Python goes through every MPI library, network and placement of the matrix.

``benchmarks/mpi/matrix.py`` walks all ordered pairs, with these programs and others; here each configuration is the
source and the target of one restart, in an order drawn by chance.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.mpi.chain import ALL, NUM_RANKS, ONE_HOST, run_command
from benchmarks.mpi.matrix_programs import make_programs
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from tests.mpi.conftest import Job

pytestmark = [pytest.mark.mpi, pytest.mark.long]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("language", ["C", "Fortran", "Python"])
def test_a_program_is_stopped_and_restarted_in_every_configuration(job: Job, tmp_path: Path, language: str) -> None:
    """The answer is that of the same program when nobody stops it."""
    program = make_programs(tmp_path)[language][0]
    dice = random.Random(language)
    tour = dice.sample(ALL, len(ALL))
    walk = run_command(program.argv, program.environment, [*tour, tour[0]], dice.randrange(1000))
    plain = (*program.argv[:-1], "0")
    job.folder = JobFolder.create(
        tmp_path / "plain", JobSpec(plain, NUM_RANKS, str(tmp_path), dict(program.environment))
    )
    assert job.stay(ONE_HOST[0].placement).outcome.state == "finished", job.events
    assert f"answer {walk.answer}" == job.answer, walk.cause
    assert len(walk.cut_s) == len(ALL), "it ended before it had been everywhere"
