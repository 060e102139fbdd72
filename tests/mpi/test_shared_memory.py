"""Ranks of one host that share memory are carried: all loads and stores are in one cut, and what they share is, too."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from remesh.carried.hosts.host_list import Host
from remesh.carried.hosts.shared_folder import host_folder, name_run
from remesh.carried.mpi.library.build import LIBRARIES
from remesh.carried.mpi.mpi_job import Placement
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from remesh.carried.rounds.leader import Coordinator
from remesh.foundation.errors import ConfigError
from tests.mpi.conftest import Job, stop_after
from tests.mpi.fortran import compiled_fortran, variables
from tests.mpi.test_library import compiled

pytestmark = pytest.mark.mpi
_TURNS = 41
"""What `shared.c` counts in a round, for each rank."""


def _through_three(job: Job, seed: object) -> str | None:
    """The answer of a job that is stopped at random moments under each MPI."""
    dice, checkpoint = random.Random(str(seed)), None
    for mpi in dice.sample(("mpich", "openmpi", "impi"), 3):
        stay = job.stay(mpi, checkpoint=checkpoint, watch=stop_after(dice.uniform(0.05, 0.6)))
        if stay.outcome.state == "finished":
            break
        assert stay.outcome.state == "stopped", job.events
        checkpoint = job.folder.checkpoint(None)
    else:
        assert job.stay("mpich", checkpoint=checkpoint).outcome.state == "finished", job.events
    assert checkpoint is not None, "it ended before it was stopped at all"
    return job.answer


@pytest.mark.parametrize(
    "face", [pytest.param(face, marks=pytest.mark.slow) if face == "mpich" else face for face in LIBRARIES]
)
def test_stores_of_all_ranks_are_in_one_cut(job: Job, tmp_path: Path, face: str) -> None:
    """The program passes a token by plain stores: a rank that comes back before another's store is seen at once."""
    rounds, num_ranks = 250, 3
    job.create(compiled("shared", face, tmp_path), rounds, 10000, num_ranks=num_ranks)
    assert _through_three(job, face) == f"answer {rounds * num_ranks * _TURNS}"


@pytest.mark.slow
def test_arrays_of_numpy_are_shared(job: Job) -> None:
    rounds, num_ranks, columns = 250, 2, 5000
    job.create("shared", rounds, 0.01, num_ranks=num_ranks)
    row, answer = sum(range(columns)), 0
    for turn in range(rounds):
        answer += row * sum(t + rank for t in range(turn + 1) for rank in range(num_ranks)) % 1009
    assert _through_three(job, "numpy") == f"answer {answer}"


@pytest.mark.parametrize("face", ["mpich", "openmpi"])
def test_fortran_shares_memory(job: Job, tmp_path: Path, face: str) -> None:
    rounds, num_ranks, columns = 250, 2, 4000
    program = compiled_fortran("shared.f90", face, tmp_path)
    argv = (str(program), str(rounds), "10000")
    job.folder = JobFolder.create(tmp_path / "job", JobSpec(argv, num_ranks, str(tmp_path), variables() | job.gated))
    row = columns * (columns + 1) // 2
    answer = sum(row * (t * (t + 1) // 2 + t * rank) for t in range(1, rounds + 1) for rank in range(num_ranks))
    assert _through_three(job, face) == f"answer {answer}"


@pytest.mark.slow
def test_a_restart_that_would_part_ranks_that_share_memory_is_refused_before_anything_starts(
    job: Job, tmp_path: Path
) -> None:
    job.create(compiled("shared", "mpich", tmp_path), 10000, 1000, num_ranks=2)
    assert job.stay("mpich", watch=stop_after(0.2)).outcome.state == "stopped", job.events
    apart = Placement("mpich", hosts=(Host("a", 1), Host("b", 1)), testbed_rate="1gbit")
    before = job.events
    with pytest.raises(ConfigError, match="ranks 0, 1 share memory .* rank 0 would be on a and rank 1 on b"):
        job.stay(apart, checkpoint=job.folder.checkpoint(None))
    assert job.events == before and job.folder.read_state().state == "stopped"


def _stop(coordinator: Coordinator) -> None:
    coordinator.request_checkpoint(stop=True)


def _fail(coordinator: Coordinator) -> None:
    coordinator.fail("a test wants it so")


def _kill(coordinator: Coordinator) -> None:
    (pid,) = (rank["pid"] for rank in coordinator.describe()["ranks"] if rank["rank"] == 0)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("end", [_stop, _fail, _kill])
def test_nothing_is_left_in_memory_however_a_job_ends(
    job: Job, tmp_path: Path, end: Callable[[Coordinator], None]
) -> None:
    job.create(compiled("shared", "mpich", tmp_path), 10000, 1000, num_ranks=2)
    folders: set[Path] = set()

    def watch(coordinator: Coordinator) -> None:
        if folders or not coordinator.all_ready:
            return
        ((host, port),) = job.folder.read_state().addresses
        folder = host_folder(name_run(job.folder.read_token(), f"{host}:{port}"))
        if any((folder / "windows").iterdir()):
            folders.add(folder)
            end(coordinator)

    job.stay("mpich", watch=watch)
    assert folders and not any(folder.exists() for folder in folders)
