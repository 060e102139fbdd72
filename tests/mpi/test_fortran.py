"""Programs of Fortran are carried, by mpif.h and both modules, on their MPI's own Fortran library and on ours.

mpi_f08 on the MPI's own is in test_shared_memory.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from tests.mpi.conftest import Job, stop_after
from tests.mpi.fortran import compiled_fortran, variables, variables_without_mpi

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("options", [(), ("-DMODULE",)], ids=["mpif.h", "mpi"])
@pytest.mark.parametrize("face", ["mpich", "openmpi"])
@pytest.mark.parametrize("libraries", [variables, variables_without_mpi], ids=["its own library", "ours"])
def test_calls_of_every_kind_go_on_under_other_mpis(
    job: Job, tmp_path: Path, face: str, options: tuple[str], libraries: Callable[..., dict[str, str]]
) -> None:
    """The program checks itself in each step; it answers what it answers when nobody stops it."""
    if libraries is variables_without_mpi:
        if face == "openmpi":
            pytest.skip("its programs are linked with Open MPI's modules, which are libraries of their own")
        environment = variables_without_mpi(tmp_path / "libraries")
    else:
        environment = variables()
    program, steps, dice = compiled_fortran("every_kind.F90", face, tmp_path, *options), 200, random.Random(face)
    _check_chain(job, tmp_path, (str(program), str(steps)), environment, dice)


@pytest.mark.slow
def test_array_sections_of_mpi_f08_go_on_under_other_mpis_without_a_library_of_mpich(job: Job, tmp_path: Path) -> None:
    environment = variables_without_mpi(tmp_path / "libraries")
    program = compiled_fortran("sections.f90", "mpich", tmp_path)
    _check_chain(job, tmp_path, (str(program), "60"), environment, random.Random("sections"))


@pytest.mark.slow
def test_an_array_section_that_a_call_would_use_after_its_return_is_refused_by_name(job: Job, tmp_path: Path) -> None:
    environment = variables_without_mpi(tmp_path / "libraries")
    program = compiled_fortran("sections.f90", "mpich", tmp_path)
    job.folder = JobFolder.create(tmp_path / "job", JobSpec((str(program), "refused"), 2, str(tmp_path), environment))
    assert job.stay("mpich").outcome.state == "failed"
    said = (job.folder.logs / "rank-0000.err").read_text()
    assert "MPI_Iallreduce: an array section of 6 elements of 4 bytes in 1 dims is not contiguous" in said
    assert "give it a contiguous array" in said


def _check_chain(
    job: Job, tmp_path: Path, argv: tuple[str, ...], environment: dict[str, str], dice: random.Random
) -> None:
    """A program that is stopped under three MPIs answers what it answers when nobody stops it."""
    answers = []
    for chain in ((), dice.sample(("mpich", "openmpi", "impi"), 3)):
        pause_us = 10000 if chain else 0
        folder = tmp_path / f"job-{len(chain)}"
        spec = JobSpec((*argv, str(pause_us)), 3, str(tmp_path), environment | job.gated)
        job.folder = JobFolder.create(folder, spec)
        checkpoint = None
        for mpi in chain:
            stay = job.stay(mpi, checkpoint=checkpoint, watch=stop_after(dice.uniform(0.05, 0.5)))
            if stay.outcome.state == "finished":
                break
            assert stay.outcome.state == "stopped", job.events
            checkpoint = job.folder.checkpoint(None)
        else:
            assert job.stay("mpich", checkpoint=checkpoint).outcome.state == "finished", job.events
        assert not chain or checkpoint is not None, "it ended before it was stopped at all"
        answers.append(job.answer)
    assert answers[0] is not None and answers[0] == answers[1]
