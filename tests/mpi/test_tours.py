"""A program in C, in Fortran and in Python goes through every MPI library, network and placement of the matrix.

``benchmarks/mpi/matrix.py`` walks all ordered pairs, with programs in Python; here each configuration is the source
and the target of one restart, in an order drawn by chance.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.mpi.chain import ALL, ENVIRONMENT, NUM_RANKS, ONE_HOST, PROGRAMS, run_command
from remesh.rounds.job_folder import JobFolder, JobSpec
from tests.mpi.conftest import Job
from tests.mpi.fortran import compiled_fortran, variables_without_mpi
from tests.mpi.test_library import compiled

pytestmark = [pytest.mark.mpi, pytest.mark.long]


def _in_c(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...], Mapping[str, str]]:
    # Rounds enough for all the stays; each is some thousand calls, which take ten seconds on a busy machine.
    argv = (str(compiled("collectives", "mpich", folder)), "40")
    return (*argv, "250000"), (*argv, "0"), {"PATH": "/usr/bin:/bin"}


def _in_fortran(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...], Mapping[str, str]]:
    argv = (str(compiled_fortran("every_kind.F90", "mpich", folder)), "600")
    return (*argv, "20000"), (*argv, "0"), variables_without_mpi(folder / "libraries")


def _in_python(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...], Mapping[str, str]]:
    argv = (sys.executable, str(PROGRAMS / "ring.py"), "1200")
    return (*argv, "0.01"), (*argv, "0"), ENVIRONMENT


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program", [_in_c, _in_fortran, _in_python], ids=["C", "Fortran", "Python"])
def test_a_program_is_stopped_and_restarted_in_every_configuration(
    job: Job, tmp_path: Path, request: pytest.FixtureRequest, program: object
) -> None:
    """The answer is that of the same program when nobody stops it."""
    assert callable(program)
    argv, plain, environment = program(tmp_path)
    dice = random.Random(request.node.callspec.id)
    tour = dice.sample(ALL, len(ALL))
    walk = run_command(argv, environment, [*tour, tour[0]], dice.randrange(1000))
    job.folder = JobFolder.create(tmp_path / "plain", JobSpec(plain, NUM_RANKS, str(tmp_path), dict(environment)))
    assert job.stay(ONE_HOST[0].placement).outcome.state == "finished", job.events
    assert f"answer {walk.answer}" == job.answer, walk.cause
    assert len(walk.cut_s) == len(ALL), "it ended before it had been everywhere"
