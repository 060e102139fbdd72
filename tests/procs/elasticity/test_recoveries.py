"""What a generation owned is given back when it is lost: descriptors, memory, threads, files, ports."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from remesh.testbed.local_job import POLL_S
from tests.procs.forked_job import ForkedJob
from tests.procs.scripts import endless

pytestmark = pytest.mark.procs
SCRIPT = str(Path(endless.__file__))
QUIET_S = 90.0
SETTLE_S = 20.0
"""How long what is on its way out may take."""
NUM_LOOKS = 20


def owned_by(pid: int) -> Counter[str]:
    """What a process has open, by kind, its threads, and the bytes of snapshots that it has mapped."""
    found: Counter[str] = Counter(threads=len(os.listdir(f"/proc/{pid}/task")))
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except FileNotFoundError:
            continue
        found[re.sub(r":?\[?\d+\]?", "", target)] += 1
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:" in line:
            start, stop = (int(one, 16) for one in line.split()[0].split("-"))
            found["bytes of memory files"] += stop - start
    return found


def owned_by_all(pids: list[int], folder: Path) -> dict[str, Counter[str]]:
    files = Counter(path.parent.name[:6] for path in folder.rglob("*"))
    return {**{str(pid): owned_by(pid) for pid in pids}, "files": Counter(files=files.total())}


def least_owned(pids: list[int], folder: Path) -> dict[str, Counter[str]]:
    """The least of some looks: a connection is made and closed now and then."""
    looks = []
    for _ in range(NUM_LOOKS):
        looks.append(owned_by_all(pids, folder))
        time.sleep(POLL_S)
    return {who: min((look[who] for look in looks), key=Counter.total) for who in looks[0]}


def follow(job: ForkedJob, generation: int, world: int) -> int:
    """Follow the job, which ends when it is told to, to a later generation of this size: all have made steps in it."""
    found = job.wait_for(lambda event: is_steady(event, generation, world), QUIET_S)["generation"]
    for _ in range(world - 1):
        job.wait_for(lambda event: is_steady(event, found - 1, world), QUIET_S)
    return int(found)


def is_steady(event: dict[str, object], generation: int, world: int) -> bool:
    number = event.get("generation")
    return event["kind"] == "steady" and event["world"] == world and isinstance(number, int) and number > generation


def assert_nothing_grew(before: dict[str, Counter[str]], pids: list[int], folder: Path) -> None:
    until_s = time.monotonic() + SETTLE_S
    while True:
        now = owned_by_all(pids, folder)
        grown = {who: now[who] - before[who] for who in now if now[who] - before[who]}
        if not grown:
            return
        assert time.monotonic() < until_s, f"grew since the first recovery: {grown}"
        time.sleep(POLL_S)


@pytest.mark.parametrize("num_kills", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_nothing_that_a_lost_generation_owned_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_kills: int
) -> None:
    """One of three workers is killed again and again; every step is kept in a snapshot."""
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with ForkedJob(tmp_path, [SCRIPT, str(tmp_path / "end")], nnodes="1", workers_per_node=3) as job:
        job.start_node("a", "--max-restarts", str(num_kills))
        generation = follow(job, 0, 3)
        survivors = [job.agents["a"].pid, job.worker_pids("a")[0], job.worker_pids("a")[2]]
        before = None
        for _ in range(num_kills):
            job.kill_worker("a", 1)
            generation = follow(job, generation, 3)
            before = before or least_owned(survivors, scratch)
        assert before is not None
        assert before[str(survivors[1])]["/memfd:remesh-snapshot (deleted)"], "it looks for what snapshots are called"
        assert_nothing_grew(before, survivors, scratch)
        (tmp_path / "end").touch()
        assert job.wait(QUIET_S) == {"a": 0}, job.describe_logs()
    assert not list(scratch.glob("remesh*"))


@pytest.mark.slow
def test_nothing_that_a_lost_node_owned_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two nodes is killed again and again, and another one takes its place."""
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with ForkedJob(tmp_path, [SCRIPT, str(tmp_path / "end")], nnodes="1:2", workers_per_node=2) as job:
        job.start_node("a")
        job.start_node("b")
        generation = follow(job, 0, 4)
        survivors = [job.agents["a"].pid, *job.worker_pids("a")]
        before = None
        for number in range(10):
            job.kill_node("b" if not number else f"b{number}")
            job.start_node(f"b{number + 1}")
            generation = follow(job, generation, 4)
            before = before or least_owned(survivors, scratch)
        assert before is not None
        assert_nothing_grew(before, survivors, scratch)
        (tmp_path / "end").touch()
        codes = job.wait(QUIET_S)
        assert codes["a"] == codes["b10"] == 0, job.describe_logs()
