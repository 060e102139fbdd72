"""Other programs that go on without a restart, beside us: torchft, and NVIDIA's in-process restart.

They come from their wheels in a folder of their own (``make peers``) and are left out by name where it is missing. Both
run the same training: four workers of one rank each, of which the last is killed, or the last two at once, as by the
death of the node that they share.

- *torchft*: every worker is a replica; a lighthouse, which is not killed, tells who belongs to the next step. A
  newcomer takes its state from a replica.
- *nvidia-resiliency-ext*: the wrapper calls the training function of the survivors anew, which starts from the
  checkpoint. It only shrinks, so each kill has a job of its own; its store lives in the first worker, which is not
  killed.

Neither has an answer to the death of the host of its meeting place: the lighthouse is one process, as is that store.

Settings are the fastest that a step of 50 ms allows: intervals of 0.1 s, heartbeats that stand still for 1 s (torchft),
collectives that end after 2 s.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, Self

from remesh.elasticity.telemetry.events import EventReader
from remesh.wire.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".peers"
NUM_WORKERS, STEPS = 4, 1_000_000
Event = dict[str, Any]


def find_versions(folder: Path = FOLDER) -> dict[str, str]:
    """What is in the folder of peers, by the name of its side."""
    wanted = {"torchft": "torchft", "nvidia-resiliency-ext": "nvrx"}
    found: Sequence[Distribution] = list(distributions(path=[str(folder)])) if folder.is_dir() else []
    return {wanted[one.name]: one.version for one in found if one.name in wanted}


class _FourWorkers:
    """Four processes that run one module; a context manager."""

    num_workers = NUM_WORKERS
    cases: Sequence[str] = ("worker", "node")
    survivors: Mapping[str, int] = {"worker": NUM_WORKERS - 1, "node": NUM_WORKERS - 2}
    name: str

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "events").mkdir(parents=True)
        self._reader = EventReader(folder / "events")
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for number in range(NUM_WORKERS):
            self._start_worker(number)
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._running.values():
            # Each leads a session, so this takes along what it started.
            try:
                os.killpg(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            one.wait()

    def poll(self) -> Sequence[Event]:
        return self._reader.poll()

    def hurt(self, case: str) -> float:
        killed_s = time.time()
        lost = [self._running[str(number)] for number in range(self.survivors[case], NUM_WORKERS)]
        for one in lost:
            one.kill()
        for one in lost:
            one.wait()
        return killed_s

    def tell_phases(self, events: Sequence[Event], killed_s: float, num_survivors: int) -> dict[str, float]:
        return {}

    def _start_worker(self, number: int) -> None:
        raise NotImplementedError

    def _start(self, name: str, command: Sequence[str], **environment: str) -> None:
        paths = os.pathsep.join(filter(None, (str(FOLDER), str(ROOT), os.environ.get("PYTHONPATH", ""))))
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, *command],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
                start_new_session=True,
            )


class TorchftSide(_FourWorkers):
    """A torchft job of four replicas."""

    name = "torchft"
    kills_per_job = 5

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._lighthouse = f"127.0.0.1:{free_port()}"

    def __enter__(self) -> Self:
        often = ("--join_timeout_ms", "200", "--quorum_tick_ms", "20", "--heartbeat_timeout_ms", "1000")
        program = str(FOLDER / "bin" / "torchft_lighthouse")
        self._start("lighthouse", [program, "--bind", self._lighthouse, "--min_replicas", "2", *often])
        return super().__enter__()

    def mend(self, case: str) -> None:
        for number in range(self.survivors[case], NUM_WORKERS):
            self._start_worker(number)

    def _start_worker(self, number: int) -> None:
        script = ("-m", "benchmarks.elastic.torchft_script", "--folder", str(self._folder), "--steps", str(STEPS))
        who = ("--replica", str(number), "--lighthouse", f"http://{self._lighthouse}")
        # By default it tells every quorum, on the standard error stream.
        self._start(str(number), [*script, *who], RUST_LOG="error")


class NvrxSide(_FourWorkers):
    """A job under nvidia-resiliency-ext's in-process wrapper."""

    name = "nvrx"
    kills_per_job = 1

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._ports = free_port(), free_port()

    def mend(self, case: str) -> None:
        """Nobody comes back: the wrapper goes on with fewer."""

    def _start_worker(self, number: int) -> None:
        script = ("-m", "benchmarks.elastic.nvrx_script", "--folder", str(self._folder), "--steps", str(STEPS))
        own_port, groups_port = map(str, self._ports)
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": own_port, "RANK": str(number)}
        # torch warns of each of its store's short waits.
        environment |= {"WORLD_SIZE": str(NUM_WORKERS), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._start(str(number), [*script, "--groups-port", groups_port], **environment)
