"""A job that fails goes on from its newest checkpoint as often as its user allows, and not where the user ended it."""

from __future__ import annotations

from pathlib import Path

import pytest

from remesh.carried.rounds.job_folder import Checkpoint, JobFolder, JobSpec
from remesh.carried.rounds.leader import JobOutcome
from remesh.carried.rounds.returns import run_with_restarts
from tests.support.log_lines import log_lines

LOST = JobOutcome("failed", "rank 1 on host h is gone", 1)
WANTED = JobOutcome("failed", "interrupted by its user", 130, is_wanted=True)
STOPPED = JobOutcome("stopped", "checkpoint 3 was taken to stop", 0)
FINISHED = JobOutcome("finished", "all programs ended with exit status 0", 0)


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder.create(tmp_path / "job", JobSpec(("app.py",), 2, "/", {}))


def _take_checkpoint(folder: JobFolder) -> Checkpoint:
    number, part = folder.begin_checkpoint()
    folder.commit_checkpoint(part, {"number": number})
    return folder.checkpoint(number)


class Stays:
    """Stays that end as a test says: a number of checkpoints that each takes first, and its outcome."""

    def __init__(self, folder: JobFolder, *stays: tuple[int, JobOutcome]) -> None:
        self._folder, self._stays = folder, iter(stays)
        self.begun: list[int | None] = []
        """The checkpoint from which each began."""

    def __call__(self, checkpoint: Checkpoint | None) -> JobOutcome:
        self.begun.append(None if checkpoint is None else checkpoint.number)
        num_checkpoints, outcome = next(self._stays)
        for _ in range(num_checkpoints):
            _take_checkpoint(self._folder)
        return outcome


def _run(folder: JobFolder, stays: Stays, max_restarts: int, checkpoint: Checkpoint | None = None) -> list[str]:
    with log_lines("remesh.carried") as said:
        outcome = run_with_restarts(stays, folder, checkpoint, max_restarts)
    return [*said, outcome.state]


def test_a_job_that_lost_ranks_twice_goes_on_twice_each_time_from_the_newest_checkpoint(folder: JobFolder) -> None:
    stays = Stays(folder, (1, LOST), (2, LOST), (0, FINISHED))
    said = _run(folder, stays, 5)
    assert stays.begun == [None, 1, 3]
    assert said == [
        "failed: rank 1 on host h is gone; restart 1 of 5, from checkpoint 1",
        "failed: rank 1 on host h is gone; restart 2 of 5, from checkpoint 3",
        "finished",
    ]
    assert said[1] in (folder.logs / "events.log").read_text()


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_a_job_that_always_fails_has_as_many_restarts_as_it_may(folder: JobFolder, max_restarts: int) -> None:
    stays = Stays(folder, *[(1, LOST)] * (max_restarts + 1))
    assert _run(folder, stays, max_restarts)[-1] == "failed"
    assert len(stays.begun) == max_restarts + 1


def test_a_program_without_a_checkpoint_is_not_begun_anew(folder: JobFolder) -> None:
    stays = Stays(folder, (0, LOST))
    assert _run(folder, stays, 9) == ["there is no checkpoint to continue from; --every takes some", "failed"]


@pytest.mark.parametrize("outcome", [WANTED, STOPPED, FINISHED], ids=lambda outcome: outcome.cause)
def test_a_job_that_has_finished_or_was_ended_by_its_user_does_not_go_on(
    folder: JobFolder, outcome: JobOutcome
) -> None:
    stays = Stays(folder, (1, outcome))
    assert _run(folder, stays, 9) == [outcome.state]


def test_who_went_back_to_an_older_checkpoint_is_not_brought_to_a_newer_one(folder: JobFolder) -> None:
    older = _take_checkpoint(folder)
    _take_checkpoint(folder)
    stays = Stays(folder, (0, LOST), (1, LOST), (0, FINISHED))
    _run(folder, stays, 3, older)
    assert stays.begun == [1, 1, 3]


def _damage(path: Path) -> None:
    (path / "manifest.json").write_text("{")


def test_a_damaged_checkpoint_is_passed_over(folder: JobFolder) -> None:
    def run(checkpoint: Checkpoint | None) -> JobOutcome:
        begun.append(None if checkpoint is None else checkpoint.number)
        if checkpoint is not None:
            return FINISHED
        _take_checkpoint(folder)
        _damage(_take_checkpoint(folder).path)
        return LOST

    begun: list[int | None] = []
    assert run_with_restarts(run, folder, None, 1) is FINISHED
    assert begun == [None, 1]
