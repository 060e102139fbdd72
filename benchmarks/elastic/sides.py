"""The programs that are hurt: Remesh and torchrun, each as a job that is killed again and again, and comes back.

Two nodes with two workers each, unless said otherwise, on this machine; each worker has a GPU where there are some.
torchrun runs with the settings that make it fastest (monitor interval 0.1 s, last call 1 s, a dead node dropped after
2 s, workers on a store of their own, without which it does not come back at all), and restarts from a checkpoint of
every 20 steps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from benchmarks.elastic.model import STEP_S
from benchmarks.elastic.phases import Recovery, split_recovery
from remesh.elasticity.telemetry.events import EventReader
from remesh.foundation.linux.procfs import children_of, family_of
from remesh.testbed.local_job import LocalJob
from remesh.wire.free_ports import free_port

CASES = ("worker", "node", "host")
STEPS, WARM_STEPS = 1_000_000, 30
TIMEOUT_S = 30.0
"""How long a job may take to come back before it counts as lost: five times torchrun's usual recovery."""
FULL_TIMEOUT_S = 90.0
"""How long all workers may take to be together before the next kill; that counts for nothing."""
POLL_S = 0.005
ROOT = Path(__file__).resolve().parents[2]
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobShape:
    """Nodes, and workers of each."""

    nodes: tuple[str, ...]
    workers_per_node: int

    @property
    def num_workers(self) -> int:
        return len(self.nodes) * self.workers_per_node

    @property
    def survivors(self) -> dict[str, int]:
        """How many workers are left, by case."""
        others = self.num_workers - self.workers_per_node
        return {"worker": self.num_workers - 1, "node": others, "host": others}


FOUR = JobShape(("a", "b"), 2)


class NotRecovered(Exception):
    """The job did not come back in time."""


class Side(Protocol):
    """A running job, of four workers unless said otherwise. A context manager."""

    name: str
    num_workers: int
    kills_per_job: int
    """After so many kills a new job is begun: not all programs can take part for ever."""
    cases: Sequence[str]
    """What it has an answer to."""
    survivors: Mapping[str, int]
    """Ranks that take the first step after a kill, by case; empty where all start anew, in groups that vary."""

    def __init__(self, folder: Path) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def poll(self) -> Sequence[Event]:
        """New events."""
        ...

    def hurt(self, case: str) -> float:
        """Do it; the time."""
        ...

    def mend(self, case: str) -> None:
        """Bring back what is gone, as a platform would."""
        ...

    def tell_phases(self, events: Sequence[Event], killed_s: float, num_survivors: int) -> dict[str, float]:
        """How a recovery splits, where the program tells."""
        ...


class RemeshSide:
    """A Remesh job; a context manager."""

    name = "remesh"
    kills_per_job = 5
    cases: Sequence[str] = CASES
    survivors: Mapping[str, int] = FOUR.survivors

    def __init__(self, folder: Path, shape: JobShape = FOUR) -> None:
        self._shape, self.num_workers, self.survivors = shape, shape.num_workers, shape.survivors
        script = ["-m", "benchmarks.elastic.remesh_script", "--folder", str(folder), "--steps", str(STEPS)]
        most = len(shape.nodes)
        self._job = LocalJob(folder, script, nnodes=f"1:{most}", workers_per_node=shape.workers_per_node)
        endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        # As under torchrun beside it: the first node serves the store.
        self._flags = {node: [*endpoint, "--no-rdzv-host"] for node in shape.nodes}
        self._flags[shape.nodes[0]] = [*endpoint, "--rdzv-host"]

    def __enter__(self) -> Self:
        self._job.__enter__()
        for node in self._flags:
            self._start(node)
        return self

    def __exit__(self, *_: object) -> None:
        self._job.__exit__()

    def poll(self) -> Sequence[Event]:
        seen = len(self._job.events)
        self._job.worker_pids("a")  # reads what is new
        return self._job.events[seen:]

    def hurt(self, case: str) -> float:
        if case == "worker":
            return self._job.kill_worker(self._shape.nodes[-1], self._shape.workers_per_node - 1)
        return self._job.kill_node(self._shape.nodes[-1 if case == "node" else 0])

    def mend(self, case: str) -> None:
        if case == "node":
            self._start(self._shape.nodes[-1])

    def tell_phases(self, events: Sequence[Event], killed_s: float, num_survivors: int) -> dict[str, float]:
        generation = min(e["generation"] for e in events if e["kind"] == "step" and e["world_size"] == num_survivors)
        # Of all events: steps that were taken just before the kill may have been read before it.
        return split_recovery(
            self._job.events, killed_s=killed_s, generation=generation, num_survivors=num_survivors, step_s=STEP_S
        )

    def _start(self, node: str) -> None:
        with _in_root():
            self._job.start_node(node, "--max-restarts", "1000", *self._flags[node])


class TorchrunSide:
    """A torchrun job; a context manager."""

    name = "torchrun"
    kills_per_job = 5
    cases: Sequence[str] = CASES
    survivors: Mapping[str, int] = {}

    def __init__(self, folder: Path, shape: JobShape = FOUR) -> None:
        self._shape, self.num_workers = shape, shape.num_workers
        self._folder = folder
        self._port = free_port()
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "events").mkdir(parents=True)
        self._reader = EventReader(folder / "events")

    def __enter__(self) -> Self:
        for node in self._shape.nodes:
            self._start(node)
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._agents:
            self._kill_node(node)

    def poll(self) -> Sequence[Event]:
        return self._reader.poll()

    def hurt(self, case: str) -> float:
        if case == "worker":
            killed_s = time.time()
            os.kill(max(children_of(self._agents[self._shape.nodes[-1]].pid)), signal.SIGKILL)
            return killed_s
        return self._kill_node(self._shape.nodes[-1 if case == "node" else 0])

    def mend(self, case: str) -> None:
        if case == "node":
            self._start(self._shape.nodes[-1])

    def tell_phases(self, events: Sequence[Event], killed_s: float, num_survivors: int) -> dict[str, float]:
        return {}

    def _start(self, node: str) -> None:
        settings = "last_call_timeout=1,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=2"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{len(self._shape.nodes)}"),
            *("--nproc-per-node", str(self._shape.workers_per_node)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "bench"),
            *("--rdzv-conf", f"{settings},is_host={str(node == self._shape.nodes[0]).lower()}"),
            *("--monitor-interval", "0.1", "--max-restarts", "1000"),
            *("-m", "benchmarks.elastic.torchrun_script", "--folder", str(self._folder), "--steps", str(STEPS)),
        ]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with _in_root(), (self._folder / f"{node}.log").open("ab") as log:
            self._agents[node] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def _kill_node(self, node: str) -> float:
        killed_s = time.time()
        for pid in family_of(self._agents[node].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._agents[node].wait()
        return killed_s


def hurt_often(side: Side, case: str, num_kills: int) -> Iterator[Recovery]:
    """Kill, wait until it trains again, let everybody come back, and again. Raises `NotRecovered`."""
    for _ in range(num_kills):
        before = wait_until_full(side)
        killed_s = side.hurt(case)
        yield wait_for_steps(side, case, killed_s, before)
        side.mend(case)


def wait_until_full(side: Side) -> int:
    """Until all workers took enough steps together; the number of the last."""
    deadline_s = time.monotonic() + FULL_TIMEOUT_S
    steps: set[int] = set()
    while time.monotonic() < deadline_s:
        for event in side.poll():
            if event["kind"] == "step":
                full = event["world_size"] == side.num_workers
                steps = steps | {event["step"]} if full else set()
        if len(steps) >= WARM_STEPS:
            return max(steps)
        time.sleep(POLL_S)
    raise NotRecovered(f"{side.num_workers} workers were not together within {FULL_TIMEOUT_S:g} s")


def wait_for_steps(side: Side, case: str, killed_s: float, before: int) -> Recovery:
    """Until all ranks that are to go on took a step on the new mesh. Raises `NotRecovered`."""
    # Under torchrun all workers start anew, in one group or, until they find each other, in two: the first counts. Half
    # a second there covers steps that were under way.
    wanted = side.survivors.get(case)
    after_s = killed_s if wanted is not None else killed_s + 0.5
    ranks: dict[int, dict[int, float]] = {}
    events: list[Event] = []
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        for event in side.poll():
            events.append(event)
            if event["kind"] == "step" and event["t"] <= killed_s:
                before = max(before, event["step"])
            elif event["kind"] == "step" and event["t"] > after_s:
                size = event["world_size"]
                if wanted is not None and size != wanted:
                    continue
                ranks.setdefault(size, {}).setdefault(event["rank"], event["t"])
                if len(ranks[size]) == size:
                    lost = max(0, before + 1 - event["step"])
                    last_s = max(ranks[size].values())
                    return Recovery(last_s - killed_s, lost, side.tell_phases(events, killed_s, size))
        time.sleep(POLL_S)
    raise NotRecovered(f"no step of all ranks within {TIMEOUT_S:g} s")


@contextlib.contextmanager
def _in_root() -> Iterator[None]:
    """Scripts are modules of this repository, found from its root."""
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(before)
