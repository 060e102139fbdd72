"""Kill a worker, or a whole node, and wait until all survivors train: Remesh beside torchrun.

Two nodes with two workers each, on this machine. torchrun runs with the settings that make it fastest (monitor
interval 0.1 s, last call 1 s, a dead node dropped after 2 s, workers on a store of their own, without which it does not
come back at all), restarts from a checkpoint of every 20 steps, and is hurt on the node that does not host its store.
Time is taken from the SIGKILL to the first step on the new mesh that the last of its ranks took.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Row, at_least
from remesh.elastic.events import EventReader
from remesh.testing.local_job import LocalJob

WARM_STEPS, STEPS, TIMEOUT_S = 30, 100_000, 120.0
GOAL_RATIO = 20.0
HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill."""

    seconds: float
    steps_lost: int


def rows(num_kills: int) -> list[Row]:
    """Both programs and both cases, in turn, ``num_kills`` times each."""
    found = []
    for case, remesh_side, torchrun_side in (
        ("one worker killed", _remesh_worker, _torchrun_worker),
        ("one node killed", _remesh_node, _torchrun_node),
    ):
        ours, theirs = [], []
        for _ in range(num_kills):
            ours.append(_in_folder(remesh_side))
            theirs.append(_in_folder(torchrun_side))
        our_s, their_s = (statistics.median(one.seconds for one in side) for side in (ours, theirs))
        spread = max(one.seconds for one in ours) / min(one.seconds for one in ours) - 1
        found += [
            at_least(
                f"{case}: torchrun over remesh", their_s / our_s, "ratio", GOAL_RATIO, peer="torchrun", spread=spread
            ),
            Row(f"{case}: remesh, kill to next step", our_s, "s", spread=spread),
            Row(f"{case}: torchrun, kill to next step", their_s, "s"),
            Row(f"{case}: remesh, steps lost", max(one.steps_lost for one in ours), "steps"),
            Row(f"{case}: torchrun, steps lost", max(one.steps_lost for one in theirs), "steps"),
        ]
    return found


def _in_folder(side: Callable[[Path], Recovery]) -> Recovery:
    with tempfile.TemporaryDirectory() as folder:
        return side(Path(folder))


def _remesh_worker(folder: Path) -> Recovery:
    return _hurt_remesh(folder, lambda job: job.kill_worker("b", 1), survivors=3)


def _remesh_node(folder: Path) -> Recovery:
    return _hurt_remesh(folder, lambda job: job.kill_node("b"), survivors=2)


def _torchrun_worker(folder: Path) -> Recovery:
    return _hurt_torchrun(folder, lambda job: job.kill_worker("b"), survivors=4)


def _torchrun_node(folder: Path) -> Recovery:
    return _hurt_torchrun(folder, lambda job: job.kill_node("b"), survivors=2)


def _hurt_remesh(folder: Path, hurt: Callable[[LocalJob], float], survivors: int) -> Recovery:
    script = ["-m", "benchmarks.elastic.remesh_script", "--steps", str(STEPS)]
    with _in_root(), LocalJob(folder, script) as job:
        job.start_node("a")
        job.start_node("b", "--max-restarts", "0")
        job.wait_for(lambda event: event["kind"] == "step" and event["step"] >= WARM_STEPS, TIMEOUT_S)
        before = max(event["step"] for event in job.of_kind("step"))
        killed_s = hurt(job)
        ranks: dict[int, float] = {}
        for event in job.follow(TIMEOUT_S):
            if event["kind"] == "step" and event["world_size"] == survivors and event["t"] > killed_s:
                ranks.setdefault(event["rank"], event["t"])
                first_step = event["step"]
            if len(ranks) == survivors:
                return Recovery(max(ranks.values()) - killed_s, max(0, before + 1 - first_step))
    raise TimeoutError("the job ended instead of going on")


class _Torchrun:
    """A torchrun job with the surface of LocalJob that is needed here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = _free_port()
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "events").mkdir()
        self.reader = EventReader(folder / "events")

    def start_node(self, node: str, *, hosts_store: bool) -> None:
        settings = "last_call_timeout=1,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=2"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "bench"),
            *("--rdzv-conf", f"{settings},is_host={str(hosts_store).lower()}"),
            *("--monitor-interval", "0.1", "--max-restarts", "5"),
            *("-m", "benchmarks.elastic.torchrun_script", "--folder", str(self._folder), "--steps", str(STEPS)),
        ]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with (self._folder / f"{node}.log").open("ab") as log:
            self.agents[node] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def kill_worker(self, node: str) -> float:
        killed_s = time.time()
        os.kill(_children_of(self.agents[node].pid)[-1], signal.SIGKILL)
        return killed_s

    def kill_node(self, node: str) -> float:
        killed_s = time.time()
        for pid in [self.agents[node].pid, *_children_of(self.agents[node].pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agents[node].wait()
        return killed_s


def _hurt_torchrun(folder: Path, hurt: Callable[[_Torchrun], float], survivors: int) -> Recovery:
    with _in_root():
        job = _Torchrun(folder)
        try:
            job.start_node("a", hosts_store=True)
            job.start_node("b", hosts_store=False)
            deadline_s = time.monotonic() + TIMEOUT_S
            before, killed_s = 0, 0.0
            ranks: dict[int, float] = {}
            while time.monotonic() < deadline_s:
                for event in job.reader.poll():
                    if not killed_s:
                        before = max(before, event["step"] if event["world_size"] == 4 else 0)
                    elif event["world_size"] == survivors and event["t"] > killed_s + 0.5:
                        # Half a second covers steps that were under way; a restart needs longer to import torch.
                        ranks.setdefault(event["rank"], event["t"])
                        first_step = event["step"]
                if not killed_s and before >= WARM_STEPS:
                    killed_s = hurt(job)
                if len(ranks) == survivors:
                    return Recovery(max(ranks.values()) - killed_s, max(0, before + 1 - first_step))
                time.sleep(0.01)
            raise TimeoutError(f"torchrun did not come back within {TIMEOUT_S:g} s")
        finally:
            for node in job.agents:
                job.kill_node(node)


@contextlib.contextmanager
def _in_root() -> Iterator[None]:
    """Scripts are modules of this repository, found from its root."""
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(before)


def _children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return sorted(int(child) for task in tasks.glob("*/children") for child in task.read_text().split())


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
