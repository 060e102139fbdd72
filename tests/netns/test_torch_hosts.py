"""Programs of torch.distributed on hosts of a testbed: stopped, killed, and continued on others, to the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remesh.carried.rounds.job_folder import JobFolder
from remesh.foundation.linux.procfs import family_of
from remesh.testbed.known_testbeds import KnownTestbed, cut, find_testbeds
from tests.procs.carried.torch_jobs import NEEDS_IMAGES, PATIENCE_S, REMESH, TorchJob, run_natively

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900), NEEDS_IMAGES]

_FOUR_RANKS = ("a:2,b:2", "c:2,d:2", "e:4", "f:1,g:2,h:1")
_TWO_RANKS = "a:1,b:1"
_ENDLESS = "1000000"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TorchJob]:
    made = TorchJob(tmp_path / "job", 2)
    yield made
    made.close()


def _on(hosts: str, *more: str) -> tuple[str, ...]:
    return ("--hosts", hosts, "--testbed", "full", "--interface", "", *more)


def _wait_until(is_so: Callable[[], bool], job: TorchJob) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert job.leader is not None
        assert job.leader.poll() is None, job.end()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _ranks(job: TorchJob) -> list[dict[str, Any]]:
    """Host and keeper of each rank now."""
    shown = subprocess.run([*REMESH, "show", str(job.folder)], capture_output=True, text=True, check=True)
    ranks: list[dict[str, Any]] = json.loads(shown.stdout)["now"]["ranks"]
    return ranks


def _kill_host(ranks: list[dict[str, Any]], host: str) -> None:
    """All processes of a host at once, as when its power fails; its link stays."""
    keepers = [each["pid"] for each in ranks if each["host"] == host]
    assert keepers
    for pid in family_of(*keepers):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _bed_of(job: TorchJob) -> KnownTestbed:
    assert job.leader is not None
    return next(bed for bed in find_testbeds() if bed.owner.pid == job.leader.pid)


def _take_checkpoint(job: TorchJob) -> None:
    """One, and the job goes on."""
    done = subprocess.run([*REMESH, "checkpoint", str(job.folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _goes_on_like(job: TorchJob, hosts: str, expected: list[str]) -> None:
    """It goes on from its last checkpoint on these hosts, and has printed what it prints when nobody touches it."""
    job.restart(*_on(hosts))
    job.wait_for(len(expected))
    assert job.lines()[: len(expected)] == expected


def _lines_of_steps(num_steps: int) -> list[str]:
    """What rank 0 prints in its first steps under torch alone."""
    lines = [line for line in run_natively("ddp.py", 2, str(num_steps)) if not line.startswith("end")]
    return sorted(lines, key=lambda line: int(line.split()[0]))


@pytest.mark.long
@pytest.mark.parametrize(("script", "steps"), [("ddp.py", 60), ("fsdp.py", 24)])
def test_training_goes_on_on_other_hosts_and_other_numbers_of_them_to_the_same_bits(
    job: TorchJob, script: str, steps: int
) -> None:
    expected, chance = run_natively(script, 4, str(steps)), random.Random(script)
    job.size, (first, *others) = 4, _FOUR_RANKS
    job.run(script, str(steps), options=_on(first))
    moments = sorted(chance.sample(range(1, steps // 2), 3))
    for moment, hosts in zip(moments, others, strict=True):
        job.wait_for(moment)
        time.sleep(chance.random() * 0.1)
        job.stop()
        job.restart(*_on(hosts))
    assert job.finish() == expected


@pytest.mark.parametrize("how", ["killed", pytest.param("silent", marks=pytest.mark.long)])
def test_a_host_that_is_lost_ends_the_job_by_name_and_the_rest_goes_on_from_the_last_checkpoint(
    job: TorchJob, how: str
) -> None:
    expected = _lines_of_steps(20)
    job.run("ddp.py", _ENDLESS, options=_on(_TWO_RANKS))
    job.wait_for(3)
    _take_checkpoint(job)
    job.wait_for(len(job.lines()) + 2)
    if how == "killed":
        _kill_host(_ranks(job), "b")
    else:
        cut(_bed_of(job), "b")
    status, said = job.end()
    assert status == 1
    assert "on host b is gone" in said
    _goes_on_like(job, "a:2", expected)


def test_a_host_that_is_killed_while_images_are_written_leaves_the_checkpoint_before(job: TorchJob) -> None:
    expected = _lines_of_steps(20)
    job.run("ddp.py", _ENDLESS, options=_on(_TWO_RANKS, "--compress"))
    job.wait_for(3)
    _take_checkpoint(job)
    ranks, folder = _ranks(job), JobFolder(job.folder)
    asked = subprocess.Popen(
        [*REMESH, "checkpoint", str(job.folder)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _wait_until((folder.images / "000002.part" / "rank-0001" / "image").exists, job)
    _kill_host(ranks, "b")
    status, said = job.end()
    asked.communicate(timeout=PATIENCE_S)
    assert (status, asked.returncode) == (1, 1)
    assert "on host b is gone" in said
    assert [(each.number, each.problem) for each in folder.checkpoints()] == [(1, "")]
    _goes_on_like(job, "c:1,a:1", expected)


def test_a_leader_that_is_killed_takes_every_rank_and_every_host_with_it(job: TorchJob) -> None:
    expected = _lines_of_steps(20)
    job.run("ddp.py", _ENDLESS, options=_on(_TWO_RANKS))
    job.wait_for(3)
    _take_checkpoint(job)
    processes = family_of(*(rank["pid"] for rank in _ranks(job)))
    assert len(processes) >= 3 * 2  # keeper, init, program
    bed = _bed_of(job)
    assert job.leader is not None
    job.leader.kill()
    job.leader.communicate(timeout=PATIENCE_S)
    deadline_s = time.monotonic() + PATIENCE_S
    while any(map(_is_running, processes)) or any(found.owner == bed.owner for found in find_testbeds()):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    _goes_on_like(job, "c:1,d:1", expected)


def _is_running(pid: int) -> bool:
    """Not over, whether or not somebody has waited for it: orphans of a test's children become the test's own."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
