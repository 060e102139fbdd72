"""A checkpoint of a program in C that is not as it was written is refused by name, and the one before it goes on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from remesh.carried.hosts.imaging import IMAGE
from remesh.carried.images.form.format import CHANNEL_FILE, CHUNKS_FILE, PAGES_FILE
from remesh.carried.images.form.image_reader import read_tree, stored_pages
from remesh.carried.mpi.lower.state_file import STATE, read_state
from remesh.carried.mpi.mpi_job import Watch
from remesh.carried.rounds.job_folder import JobFolder, rank_name
from remesh.carried.rounds.leader import Coordinator
from remesh.foundation.checksums import crc32
from remesh.foundation.errors import Error
from tests.damage import damaged
from tests.mpi.conftest import Job
from tests.mpi.test_library import compiled

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

_NUM_RANKS = 2


def _take_two() -> Watch:
    """One checkpoint, and another one that stops; each is asked for once, for a round may be tried again."""
    asked: list[int] = []

    def watch(coordinator: Coordinator) -> None:
        taken = (coordinator.last_checkpoint or {"number": 0})["number"]
        if coordinator.all_ready and taken == len(asked) < 2:
            asked.append(taken)
            coordinator.request_checkpoint(stop=taken == 1)

    return watch


@pytest.fixture
def stopped(job: Job, tmp_path: Path) -> Job:
    """A program in C with two checkpoints."""
    job.create(compiled("ring", "mpich", tmp_path), 30, 0.1, num_ranks=_NUM_RANKS)
    assert job.stay("mpich", watch=_take_two()).outcome.state == "stopped", job.events
    assert [each.number for each in job.folder.checkpoints()][:2] == [1, 2]
    return job


def _read_as_a_restart_does(folder: JobFolder, *, with_pages: bool) -> list[Any]:
    checkpoint = folder.checkpoint(None)
    ranks = [checkpoint.rank_folder(rank) for rank in range(_NUM_RANKS)]
    reports = [checkpoint.manifest["ranks"][rank_name(rank)] for rank in range(_NUM_RANKS)]
    states = [read_state(*each) for each in zip(ranks, reports, strict=True)]
    trees = [read_tree(each / IMAGE) for each in ranks]
    found: list[Any] = [checkpoint.manifest, *states, *trees]
    for member in [member for tree in trees for member in tree.members] if with_pages else ():
        found.append([(offset, crc32(raw)) for offset, raw in stored_pages(member.folder)])
    return found


def test_a_hundred_damages_are_refused_by_name_or_change_nothing(stopped: Job) -> None:
    """As a restart reads them, without a process."""
    folder, chance = stopped.folder, random.Random(18)
    whole = _read_as_a_restart_does(folder, with_pages=True)
    files = sorted(path for path in folder.checkpoint(None).path.rglob("*") if path.is_file())
    num_refused = 0
    for _ in range(100):
        path = chance.choice(files)
        with damaged(path, chance) as how:
            with_pages = path.name in (PAGES_FILE, CHUNKS_FILE)
            try:
                found = _read_as_a_restart_does(folder, with_pages=with_pages)
                assert found == whole[: len(found)], f"{path}, {how}"
            except Error as error:
                assert path.name in str(error) or str(path.parent) in str(error), f"{path}, {how}: {error}"
                num_refused += 1
    assert num_refused > 90


def test_a_restart_of_a_damaged_checkpoint_ends_by_name_and_the_one_before_it_goes_on(stopped: Job) -> None:
    folder, chance = stopped.folder, random.Random(18)
    last = folder.checkpoint(None)
    for name in (STATE, PAGES_FILE, CHANNEL_FILE):
        path = next(last.rank_folder(1).rglob(name))
        with damaged(path, chance) as how:
            refused = stopped.stay("openmpi", checkpoint=last).outcome
            assert refused.state == "failed" and str(path.parent) in refused.cause, f"{path}, {how}: {refused.cause}"
    with damaged(last.path / "manifest.json", chance):
        with pytest.raises(Error, match="manifest.json"):
            folder.checkpoint(None)
        ended = stopped.stay("impi", checkpoint=folder.checkpoint(1))
        assert ended.outcome.state == "finished", stopped.events
    answer = stopped.answer
    assert answer is not None
    assert stopped.stay("impi", checkpoint=folder.checkpoint(2)).outcome.state == "finished", stopped.events
    assert stopped.answer == answer
