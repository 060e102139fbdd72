"""What a rank has started is carried with it: its children, the shells of system(), a pool of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from remesh.images.stored import read_tree
from remesh.ranks.imaging import IMAGE
from tests.mpi.conftest import Job, stop_after
from tests.mpi.test_library import _create, compiled

pytestmark = pytest.mark.mpi


def _chain(job: Job) -> list[int]:
    """Stop under one MPI after the other, and end; how many processes each rank's image held."""
    checkpoint, nums = None, []
    for mpi in ("mpich", "openmpi"):
        stopped = job.stay(mpi, checkpoint=checkpoint, watch=stop_after(0.4))
        assert stopped.outcome.state == "stopped", job.events
        checkpoint = job.folder.checkpoint(None)
        nums += [len(read_tree(checkpoint.rank_folder(rank) / IMAGE).members) for rank in range(2)]
    assert job.stay("impi", checkpoint=checkpoint).outcome.state == "finished", job.events
    return nums


def test_a_program_in_c_that_forks_and_calls_system(job: Job, tmp_path: Path) -> None:
    rounds = 50
    _create(job, tmp_path, compiled("children", "mpich", tmp_path), 2, rounds, 50_000)
    nums = _chain(job)
    assert min(nums) >= 2 and max(nums) >= 3
    sums = sum(2 * (2 * (number % 7) + 1) + (10 * number) ** 2 + (10 * number + 1) ** 2 for number in range(rounds))
    assert job.answer == f"answer {sums + 3 + 4}"


def test_a_program_in_python_with_a_pool(job: Job) -> None:
    job.create("workers", 12, 0.05, num_ranks=2)
    assert max(_chain(job)) >= 3
    tasks = [100 * rank + 10 * number + each for rank in range(2) for number in range(12) for each in range(6)]
    assert job.answer == f"answer {sum(pow(3, each, 1_000_003) * each for each in tasks) % 1_000_000_007}"
