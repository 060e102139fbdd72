"""Programs of torch.distributed that know nothing of us: stopped, restarted, compared with runs that nobody touched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remesh.linux.procfs import start_of
from remesh.rounds.job_folder import JobFolder, rank_name
from tests.procs.torch_jobs import NEEDS_IMAGES, PATIENCE_S, PROGRAMS, REMESH, TorchJob, run_natively, stop_and_compare

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600), NEEDS_IMAGES]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TorchJob]:
    made = TorchJob(tmp_path / "job", 2)
    yield made
    made.close()


def test_data_parallel_training_goes_on_to_the_same_bits(job: TorchJob) -> None:
    stop_and_compare(job, 2, "ddp.py", 500, 1)


def test_a_cut_waits_for_no_rank_that_computes_while_others_are_inside_collectives(
    job: TorchJob, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    job.size = 3
    job.run("late.py", str(go), options=("--round-limit", "30"))
    job.wait_for(3)
    job.stop()
    job.restart()
    job.stop()
    go.touch()
    job.restart()
    assert job.finish() == run_natively("late.py", 3, str(go))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "size", "steps", "stops", "more"),
    [
        ("ddp.py", 3, 400, 5, ()),
        ("fsdp.py", 4, 60, 5, ()),
        ("fsdp_transformer.py", 2, 200, 20, ()),
        ("pipeline.py", 3, 400, 20, ()),
        ("mingpt.py", 2, 400, 20, ("2",)),
        ("mingpt.py", 2, 200, 5, ("0", "--compile")),
    ],
)
def test_stopped_again_and_again_training_goes_on_to_the_same_bits(
    job: TorchJob, script: str, size: int, steps: int, stops: int, more: tuple[str, ...]
) -> None:
    stop_and_compare(job, size, script, steps, stops, *more)


@pytest.mark.slow
def test_workers_of_a_data_loader_are_carried(job: TorchJob) -> None:
    stop_and_compare(job, 2, "ddp.py", 400, 2, "2")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_program_of_chance_gets_what_it_gets_from_torch_alone(job: TorchJob, seed: int) -> None:
    job.size = 3
    expected = run_natively("collectives.py", 3, str(seed), "1500")
    job.run("collectives.py", str(seed), "1500", options=("--every", "1.5"))
    job.wait_for(60)
    job.stop()
    job.restart("--every", "1.5")
    assert job.finish() == expected
    taken = [each.number for each in JobFolder(job.folder).checkpoints()]
    assert taken[-1] >= 2


def test_a_job_that_is_led_is_led_by_nobody_else(job: TorchJob) -> None:
    job.run("steady.py")
    job.wait_for(5)
    asked = subprocess.run([*REMESH, "checkpoint", str(job.folder), "--stop"], capture_output=True, text=True)
    assert "stopped" in asked.stdout, asked.stderr
    assert job.end()[0] == 0
    job.restart()
    job.wait_for(len(job.lines()) + 2)
    second = subprocess.run([*REMESH, "restart", str(job.folder)], capture_output=True, text=True)
    assert second.returncode == 1
    assert "leads it, expected nobody" in second.stderr


def test_a_rank_that_dies_ends_the_job_and_leaves_its_checkpoints(job: TorchJob) -> None:
    job.run("steady.py", options=("--every", "2"))
    job.wait_for(5)
    deadline_s = time.monotonic() + PATIENCE_S
    while not JobFolder(job.folder).checkpoints():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    now = subprocess.run([*REMESH, "show", str(job.folder)], capture_output=True, text=True, check=True)
    os.kill(json.loads(now.stdout)["now"]["ranks"][1]["pid"], signal.SIGKILL)
    status, said = job.end()
    assert status == 1
    assert "rank 1" in said
    assert not JobFolder(job.folder).checkpoints()[0].problem
    job.restart()
    job.wait_for(len(job.lines()) + 2)


def test_what_does_not_fit_a_checkpoint_is_refused_and_harms_nothing(job: TorchJob, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    shutil.copy(PROGRAMS / "steady.py", script)
    job.run(str(script))
    job.wait_for(3)
    job.stop()
    folder = JobFolder(job.folder).checkpoint(None).path

    text = script.read_text()
    script.write_text(text + "# another one\n")
    assert "its script is" in _refused(job)
    script.write_text(text)

    store = (folder / "store.json").read_bytes()
    (folder / "store.json").write_bytes(store[:-1])
    assert "its digest does not match" in _refused(job)
    (folder / "store.json").write_bytes(store)

    pages = next(path for path in sorted((folder / rank_name(1)).rglob("pages.bin")))
    whole = pages.read_bytes()
    pages.write_bytes(whole[:4096] + bytes([whole[4096] ^ 1]) + whole[4097:])
    assert "rank 1" in _refused(job)
    pages.write_bytes(whole)

    other = subprocess.run(
        [sys.executable, "-m", "remesh", "mpi", "restart", str(job.folder)], capture_output=True, text=True
    )
    assert other.returncode == 1
    assert "remesh torch restart" in other.stderr

    before = len(job.lines())
    job.restart()
    job.wait_for(before + 2)


def _refused(job: TorchJob) -> str:
    job.restart()
    status, said = job.end()
    assert status == 1
    return said


def test_when_the_leader_is_killed_nothing_is_left_and_the_checkpoint_stays(job: TorchJob) -> None:
    job.run("steady.py", options=("--every", "1"))
    job.wait_for(1)
    deadline_s = time.monotonic() + PATIENCE_S
    while not JobFolder(job.folder).checkpoints():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    now = subprocess.run([*REMESH, "show", str(job.folder)], capture_output=True, text=True, check=True)
    keepers = [each["pid"] for each in json.loads(now.stdout)["now"]["ranks"]]
    assert job.leader is not None
    job.leader.kill()
    job.leader.communicate()
    while any(start_of(pid) is not None for pid in keepers):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    job.restart()
    job.wait_for(len(job.lines()) + 2)
