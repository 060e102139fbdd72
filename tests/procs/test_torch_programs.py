"""Programs of torch.distributed that know nothing of us: stopped, restarted, compared with runs that nobody touched."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remesh.comm.free_ports import free_port
from remesh.images import examine_machine
from remesh.linux.procfs import start_of
from remesh.rounds.job_folder import JobFolder, rank_name

pytestmark = [
    pytest.mark.procs,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        any(each.needed and not each.good for each in examine_machine()),
        reason="process images need what is missing here",
    ),
]

_PROGRAMS = Path(__file__).parent / "torch_programs"
_REMESH = (sys.executable, "-m", "remesh", "torch")
_PATIENCE_S = 300.0


def _native(script: str, size: int, *arguments: str) -> list[str]:
    """What the program prints when torch's own groups carry it."""
    port = free_port()
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, _PROGRAMS / script, *arguments],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    printed = [rank.communicate(timeout=_PATIENCE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size
    return sorted(line for text in printed for line in text.splitlines())


class _Job:
    """A job under `remesh torch`."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.leader: subprocess.Popen[str] | None = None

    def run(self, script: str, *arguments: str, options: tuple[str, ...] = ()) -> None:
        how = ("--nproc-per-node", str(self.size), "--job", str(self.folder), "--interface", "lo", *options)
        self._start("run", *how, str(_PROGRAMS / script), *arguments)

    def restart(self, *options: str) -> None:
        self._start("restart", str(self.folder), *options)

    def _start(self, *words: str) -> None:
        self.leader = subprocess.Popen(
            [*_REMESH, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=self.folder.parent
        )

    def end(self) -> tuple[int, str]:
        """Status of its leader, and what that said."""
        assert self.leader is not None
        said = self.leader.communicate(timeout=_PATIENCE_S)[1]
        return self.leader.returncode, said

    def stop(self) -> None:
        """A checkpoint that stops, asked for by a signal: a command would start for longer than some programs run."""
        assert self.leader is not None
        # What an earlier stay printed says nothing of this one, which hears signals once it runs.
        deadline_s = time.monotonic() + _PATIENCE_S
        while self.state() != "running":
            assert self.leader.poll() is None, self.end()
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        self.leader.send_signal(signal.SIGTERM)
        status, said = self.end()
        assert (status, self.state()) == (0, "stopped"), said

    def finish(self) -> list[str]:
        status, said = self.end()
        assert (status, self.state()) == (0, "finished"), said
        return sorted(self.lines())

    def state(self) -> str:
        return JobFolder(self.folder).read_state().state

    def lines(self) -> list[str]:
        paths = [self.folder / "logs" / f"{rank_name(rank)}.out" for rank in range(self.size)]
        return [line for path in paths if path.exists() for line in path.read_text().splitlines()]

    def wait_for(self, num_lines: int) -> None:
        """Until it has printed so many lines."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while len(self.lines()) < num_lines:
            assert self.leader is not None
            assert self.leader.poll() is None, self.end()
            assert time.monotonic() < deadline_s
            time.sleep(0.005)

    def close(self) -> None:
        if self.leader is not None and self.leader.poll() is None:
            # Its keepers end when it is gone, however it ends.
            self.leader.kill()
            self.leader.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[_Job]:
    made = _Job(tmp_path / "job", 2)
    yield made
    made.close()


def _stop_and_compare(job: _Job, size: int, script: str, steps: int, stops: int, *more: str) -> None:
    """Stopped at random moments and restarted, it prints what it prints when nobody touches it."""
    expected = _native(script, size, str(steps), *more)
    chance = random.Random(script)
    job.size = size
    job.run(script, str(steps), *more)
    for moment in sorted(chance.sample(range(1, steps // 2), stops)):
        job.wait_for(moment)
        time.sleep(chance.random() * 0.1)
        job.stop()
        job.restart()
    assert job.finish() == expected


def test_data_parallel_training_goes_on_to_the_same_bits(job: _Job) -> None:
    _stop_and_compare(job, 2, "ddp.py", 300, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "size", "steps"), [("ddp.py", 3, 400), ("fsdp.py", 4, 60), ("pipeline.py", 3, 200)])
def test_stopped_again_and_again_training_goes_on_to_the_same_bits(
    job: _Job, script: str, size: int, steps: int
) -> None:
    _stop_and_compare(job, size, script, steps, 5)


@pytest.mark.slow
def test_workers_of_a_data_loader_are_carried(job: _Job) -> None:
    _stop_and_compare(job, 2, "ddp.py", 400, 2, "2")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_program_of_chance_gets_what_it_gets_from_torch_alone(job: _Job, seed: int) -> None:
    job.size = 3
    expected = _native("collectives.py", 3, str(seed), "1500")
    job.run("collectives.py", str(seed), "1500", options=("--every", "1.5"))
    job.wait_for(60)
    job.stop()
    job.restart("--every", "1.5")
    assert job.finish() == expected
    taken = [each.number for each in JobFolder(job.folder).checkpoints()]
    assert taken[-1] >= 2


def test_a_job_that_is_led_is_led_by_nobody_else(job: _Job) -> None:
    job.run("ddp.py", "100000")
    job.wait_for(5)
    asked = subprocess.run([*_REMESH, "checkpoint", str(job.folder), "--stop"], capture_output=True, text=True)
    assert "stopped" in asked.stdout, asked.stderr
    assert job.end()[0] == 0
    job.restart()
    job.wait_for(len(job.lines()) + 2)
    second = subprocess.run([*_REMESH, "restart", str(job.folder)], capture_output=True, text=True)
    assert second.returncode == 1
    assert "leads it, expected nobody" in second.stderr


def test_a_rank_that_dies_ends_the_job_and_leaves_its_checkpoints(job: _Job) -> None:
    job.run("ddp.py", "100000", options=("--every", "2"))
    job.wait_for(5)
    deadline_s = time.monotonic() + _PATIENCE_S
    while not JobFolder(job.folder).checkpoints():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    now = subprocess.run([*_REMESH, "show", str(job.folder)], capture_output=True, text=True, check=True)
    os.kill(json.loads(now.stdout)["now"]["ranks"][1]["pid"], signal.SIGKILL)
    status, said = job.end()
    assert status == 1
    assert "rank 1" in said
    assert not JobFolder(job.folder).checkpoints()[0].problem
    job.restart()
    job.wait_for(len(job.lines()) + 2)


def test_what_does_not_fit_a_checkpoint_is_refused_and_harms_nothing(job: _Job, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    shutil.copy(_PROGRAMS / "ddp.py", script)
    job.run(str(script), "100000")
    job.wait_for(3)
    job.stop()
    folder = JobFolder(job.folder).checkpoint(None).path

    text = script.read_text()
    script.write_text(text + "# another one\n")
    assert "its script is" in _refused(job)
    script.write_text(text)

    store = (folder / "store.json").read_bytes()
    (folder / "store.json").write_bytes(store[:-1])
    assert "its digest does not fit" in _refused(job)
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


def _refused(job: _Job) -> str:
    job.restart()
    status, said = job.end()
    assert status == 1
    return said


def test_when_the_leader_is_killed_nothing_is_left_and_the_checkpoint_stays(job: _Job) -> None:
    job.run("ddp.py", "100000", options=("--every", "1"))
    job.wait_for(1)
    deadline_s = time.monotonic() + _PATIENCE_S
    while not JobFolder(job.folder).checkpoints():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    now = subprocess.run([*_REMESH, "show", str(job.folder)], capture_output=True, text=True, check=True)
    keepers = [each["pid"] for each in json.loads(now.stdout)["now"]["ranks"]]
    assert job.leader is not None
    job.leader.kill()
    job.leader.communicate()
    while any(start_of(pid) is not None for pid in keepers):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    job.restart()
    job.wait_for(len(job.lines()) + 2)
