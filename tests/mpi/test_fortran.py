"""Programs of Fortran, by mpif.h and by the module mpi, are carried; mpi_f08 is in test_shared_memory.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from remesh.rounds.job_folder import JobFolder, JobSpec
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
    answers = []
    for chain in ((), dice.sample(("mpich", "openmpi", "impi"), 3)):
        pause_us = 10000 if chain else 0
        argv = (str(program), str(steps), str(pause_us))
        folder = tmp_path / f"job-{len(chain)}"
        job.folder = JobFolder.create(folder, JobSpec(argv, 3, str(tmp_path), environment))
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
