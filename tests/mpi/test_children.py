"""What a rank has started is carried with it: its children, the shells of system(), a pool of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from remesh.carried.hosts.imaging import IMAGE
from remesh.carried.images.form.image_reader import read_tree
from remesh.carried.mpi.mpi_job import Watch
from remesh.carried.rounds.leader import Coordinator
from tests.mpi.conftest import Job, stop_after
from tests.mpi.test_library import _create, compiled

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def _chain(job: Job, first: Watch, after_the_first: Callable[[], None] = lambda: None) -> list[int]:
    """Stop under one MPI after the other, the first time by a watch, and end; how many processes each image held."""
    checkpoint, nums = None, []
    for mpi, watch in (("mpich", first), ("openmpi", stop_after(0.4))):
        stopped = job.stay(mpi, checkpoint=checkpoint, watch=watch)
        assert stopped.outcome.state == "stopped", job.events
        if checkpoint is None:
            after_the_first()
        checkpoint = job.folder.checkpoint(None)
        nums += [len(read_tree(checkpoint.rank_folder(rank) / IMAGE).members) for rank in range(2)]
    assert job.stay("impi", checkpoint=checkpoint).outcome.state == "finished", job.events
    return nums


def test_a_program_in_c_that_forks_and_calls_system(job: Job, tmp_path: Path) -> None:
    rounds, sign = 50, tmp_path / "sign"
    _create(job, tmp_path, compiled("children", "mpich", tmp_path), 2, rounds, 50_000, sign)
    asked: list[bool] = []

    def stop_in_the_shells(coordinator: Coordinator) -> None:
        if not asked and all((tmp_path / f"sign.awaited{rank}").exists() for rank in range(2)):
            asked.append(True)
            coordinator.request_checkpoint(stop=True)

    nums = _chain(job, stop_in_the_shells, sign.touch)
    assert min(nums[:2]) >= 3 and min(nums[2:]) >= 2
    sums = sum(2 * (2 * (number % 7) + 1) + (10 * number) ** 2 + (10 * number + 1) ** 2 for number in range(rounds))
    assert job.answer == f"answer {sums + 3 + 4}"


def test_a_program_in_python_with_a_pool(job: Job) -> None:
    job.create("workers", 12, 0.05, num_ranks=2)
    assert max(_chain(job, stop_after(0.4))) >= 3
    tasks = [100 * rank + 10 * number + each for rank in range(2) for number in range(12) for each in range(6)]
    assert job.answer == f"answer {sum(pow(3, each, 1_000_003) * each for each in tasks) % 1_000_000_007}"
