"""What goes wrong under `remesh torch`: one clear error, nothing lost, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remesh.rounds.job_folder import JobFolder, rank_name
from tests.procs.torch_jobs import NEEDS_IMAGES, PATIENCE_S, REMESH, TorchJob, run_natively

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600), NEEDS_IMAGES]
_SMALL_BYTES = 30_000_000


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TorchJob]:
    """After it nothing is left of its processes."""
    made = TorchJob(tmp_path / "job", 2)
    yield made
    made.close()
    deadline_s = time.monotonic() + PATIENCE_S
    while left := _processes_of(tmp_path):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def _processes_of(folder: Path) -> list[str]:
    """Commands that name the folder or work in it; a zombie has neither."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
            where = os.readlink(process / "cwd")
        except OSError:
            continue
        if str(folder) in words or where.startswith(str(folder)):
            found.append(words.replace("\0", " "))
    return found


def _checkpoint(job: TorchJob) -> str:
    asked = subprocess.run([*REMESH, "checkpoint", str(job.folder)], capture_output=True, text=True, timeout=PATIENCE_S)
    return asked.stdout + asked.stderr


def _goes_on(job: TorchJob) -> None:
    job.wait_for(len(job.lines()) + 2)


def _nothing_is_left_of_it(job: TorchJob) -> None:
    """Of a checkpoint that was given up; who asked for it is told before its files are gone."""
    deadline_s = time.monotonic() + PATIENCE_S
    while left := list(JobFolder(job.folder).images.iterdir()):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def test_children_forked_in_the_middle_of_collectives_are_carried_and_so_is_a_folder_that_was_moved(
    job: TorchJob, tmp_path: Path
) -> None:
    job.run("forks.py", "150")
    job.wait_for(20)
    job.stop()
    (tmp_path / "elsewhere").mkdir()
    job.folder = job.folder.rename(tmp_path / "elsewhere" / "moved")
    job.restart()
    assert job.finish() == run_natively("forks.py", 2, "150")


def test_a_connection_of_the_program_is_refused_by_name_and_the_job_goes_on(job: TorchJob) -> None:
    job.run("odd.py", "socket")
    job.wait_for(2)
    said = _checkpoint(job)
    assert "rank 1" in said and "socket" in said
    _goes_on(job)
    assert JobFolder(job.folder).checkpoints() == []
    _nothing_is_left_of_it(job)


def test_a_backend_that_is_not_known_is_refused_by_name(job: TorchJob) -> None:
    job.run("odd.py", "backend")
    status, said = job.end()
    assert status == 1
    told = (job.folder / "logs" / f"{rank_name(0)}.err").read_text()
    assert "its-own" in told and "Remesh can checkpoint gloo and nccl only" in told, said


def test_a_disk_without_room_gives_the_checkpoint_up_and_the_job_goes_on(job: TorchJob) -> None:
    job.run("steady.py")
    job.wait_for(5)
    now = subprocess.run([*REMESH, "show", str(job.folder)], capture_output=True, text=True, check=True)
    # No file of this rank's keeper may be longer, as on a disk that has no more room.
    keeper = json.loads(now.stdout)["now"]["ranks"][1]["pid"]
    subprocess.run(["prlimit", f"--pid={keeper}", f"--fsize={_SMALL_BYTES}"], check=True)
    said = _checkpoint(job)
    assert "rank 1 could not write its image" in said and "File too large" in said
    _goes_on(job)
    _nothing_is_left_of_it(job)


def test_a_rank_that_dies_while_images_are_written_leaves_the_checkpoint_before(job: TorchJob) -> None:
    job.run("ddp.py", "100000")
    job.wait_for(5)
    assert "checkpoint 1" in _checkpoint(job)
    now = subprocess.run([*REMESH, "show", str(job.folder)], capture_output=True, text=True, check=True)
    keeper = json.loads(now.stdout)["now"]["ranks"][1]["pid"]
    assert job.leader is not None
    job.leader.send_signal(signal.SIGTERM)
    images, deadline_s = JobFolder(job.folder).images, time.monotonic() + PATIENCE_S
    while not _begun(images):
        assert time.monotonic() < deadline_s
    os.kill(keeper, signal.SIGKILL)
    status, said = job.end()
    assert status == 1 and "rank 1" in said
    assert [each.number for each in JobFolder(job.folder).checkpoints()] == [1]
    job.restart()
    _goes_on(job)


def _begun(images: Path) -> list[Path]:
    """Folders of rank 1 in checkpoints after the first."""
    return [each for each in images.glob(f"*/{rank_name(1)}") if not each.parent.name.endswith("000001")]
