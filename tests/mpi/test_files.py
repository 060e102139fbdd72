"""Programs that write files together are carried, and their files are right in the end."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from remesh.carried.images.form.kinds import OpenFilePolicy
from remesh.carried.mpi.mpi_job import RunSettings, Watch
from remesh.carried.rounds.leader import Coordinator
from tests.mpi.conftest import Job, stop_after

pytestmark = pytest.mark.mpi

_ANSWER = "answer 3736babbca4c2d68"
"""Of 30 steps on 4 ranks, from a real MPI without us."""


def _kill_after_a_checkpoint(path: Path) -> Watch:
    """Take a checkpoint, and kill a rank when the file has been written to since."""
    take = stop_after(0.5, stop=False)
    times_ns: list[int] = []

    def watch(coordinator: Coordinator) -> None:
        if path.exists():
            take(coordinator)
        if coordinator.last_checkpoint is None:
            return
        times_ns.append(path.stat().st_mtime_ns)
        if times_ns[-1] != times_ns[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(coordinator.describe()["ranks"][1]["pid"], signal.SIGKILL)

    return watch


@pytest.mark.parametrize(
    "table", [pytest.param((), marks=pytest.mark.slow, id="growing"), pytest.param(("table",), id="in-place")]
)
def test_a_file_that_ranks_write_together_is_carried_from_mpi_to_mpi(
    job: Job, tmp_path: Path, table: tuple[str, ...]
) -> None:
    job.create("results", 30, 0.05, tmp_path / "results.bin", *table)
    assert job.stay("openmpi", watch=stop_after(0.4)).outcome.state == "stopped", job.events
    checkpoint = job.folder.checkpoint(None)
    settings = RunSettings(every_s=0.3)
    second = job.stay("mpich", settings=settings, checkpoint=checkpoint, watch=stop_after(0.8))
    assert second.outcome.state == "stopped", job.events
    ended = job.stay("impi", checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished", job.events
    assert job.answer == _ANSWER


def test_what_was_written_behind_the_end_after_the_checkpoint_is_cut_off(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "results.bin"
    job.create("results", 30, 0.25, path)
    failed = job.stay("mpich", watch=_kill_after_a_checkpoint(path))
    assert failed.outcome.state == "failed", job.events
    with path.open("ab") as file:
        file.write(bytes(30 * 96_000))
    ended = job.stay("openmpi", checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished", job.events
    # The file would be longer if it had not been cut.
    assert job.answer == _ANSWER


def test_what_was_changed_in_place_after_the_checkpoint_is_refused_or_written_again(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "results.bin"
    job.create("results", 30, 0.25, path, "table")
    failed = job.stay("mpich", watch=_kill_after_a_checkpoint(path))
    assert failed.outcome.state == "failed", job.events
    checkpoint = job.folder.checkpoint(None)
    refused = job.stay("openmpi", checkpoint=checkpoint)
    assert refused.outcome.state == "failed"
    assert "results.bin" in refused.outcome.cause and "was changed since" in refused.outcome.cause
    settings = RunSettings(open_files=OpenFilePolicy.REWRITE)
    ended = job.stay("openmpi", checkpoint=checkpoint, settings=settings)
    assert ended.outcome.state == "finished", job.events
    assert job.answer == _ANSWER


@pytest.mark.parametrize("place", [(), ("shared",)], ids=["own", "shared"])
def test_ranks_that_write_at_their_own_speed_lose_no_record(job: Job, tmp_path: Path, place: tuple[str, ...]) -> None:
    path, enough = tmp_path / "records.bin", tmp_path / "enough"
    job.create("loners", 4000, 0.004, path, enough, *place)
    for mpi in ("mpich", "openmpi", "impi"):
        checkpoint = job.folder.checkpoint(None) if list(job.folder.checkpoints()) else None
        stopped = job.stay(mpi, settings=RunSettings(every_s=0.4), checkpoint=checkpoint, watch=stop_after(1.0))
        assert stopped.outcome.state == "stopped", job.events
    enough.touch()
    checkpoint = job.folder.checkpoint(None)
    failed = job.stay("mpich", checkpoint=checkpoint, watch=_kill_after_a_checkpoint(path))
    assert failed.outcome.state == "failed", job.events
    settings = RunSettings(open_files=OpenFilePolicy.REWRITE)
    ended = job.stay("mpich", settings=settings, checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished", job.events
    assert job.answer == "answer 0fa1480cb7f7589f"


def test_checkpoints_in_the_middle_of_streams_of_accesses_lose_nothing_and_do_nothing_twice(
    job: Job, tmp_path: Path
) -> None:
    enough = tmp_path / "enough"
    job.create("tallies", tmp_path / "tallies.bin", enough)
    checkpoint = None
    for mpi in ("mpich", "openmpi", "impi", "mpich"):
        settings = RunSettings(every_s=0.05)
        stopped = job.stay(mpi, settings=settings, checkpoint=checkpoint, watch=stop_after(0.8))
        assert stopped.outcome.state == "stopped", job.events
        checkpoint = job.folder.checkpoint(None)
    enough.touch()
    ended = job.stay("mpich", checkpoint=checkpoint)
    assert ended.outcome.state == "finished", job.events
    assert job.answer == "answer every rank counted"
