"""One job that is stopped and restarted again and again, each time somewhere else; and what was seen on the way."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from remesh.carried.hosts.host_list import Host
from remesh.carried.mpi.mpi_job import Placement, RunSettings, run_job_once
from remesh.carried.mpi.mpis import find_mpi
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from remesh.carried.rounds.leader import Coordinator
from tests.mpi.patience import Patience, run_patiently

PROGRAMS = Path(__file__).resolve().parents[2] / "tests" / "mpi" / "programs"
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONPATH": str(PROGRAMS.parents[2] / ".mpi" / "programs"),
}
"""Of a carried program; mpi4py is among the packages of `make mpi`."""
NUM_RANKS = 4


@dataclass(frozen=True, slots=True)
class Config:
    """A library, a network and a placement."""

    mpi: str
    network: str
    ranks_per_host: tuple[int, ...]
    """One entry for each host; (4,) is this machine."""

    def __str__(self) -> str:
        return f"{self.mpi} {self.network} {'+'.join(map(str, self.ranks_per_host))}"

    @property
    def placement(self) -> Placement:
        """As `run_job_once` takes it."""
        if len(self.ranks_per_host) == 1:
            return Placement(self.mpi, self.network)
        hosts = tuple(Host(f"host{index}", count) for index, count in enumerate(self.ranks_per_host))
        return Placement(self.mpi, self.network, hosts, "full")


ONE_HOST = tuple(
    Config(mpi, network, (NUM_RANKS,))
    for mpi, network in (
        *(("openmpi", "shm"), ("openmpi", "tcp"), ("mpich", "shm"), ("mpich", "ofi"), ("impi", "shm"), ("impi", "tcp")),
    )
)
HOSTS = tuple(
    Config(mpi, network, places)
    for places in ((2, 2), (1, 1, 1, 1), (1, 3))
    for mpi, network in (("openmpi", "tcp"), ("mpich", "ofi"), ("mpich", "ucx"), ("impi", "tcp"))
)
ALL = ONE_HOST + HOSTS


@dataclass(frozen=True, slots=True)
class Walk:
    """What came of a chain."""

    configs: tuple[Config, ...]
    answer: str
    """What rank 0 printed after ``answer``; empty if the chain broke."""
    cause: str
    """Why it ended."""
    caught: Mapping[str, int]
    """Over all its checkpoints, by kind."""
    cut_s: tuple[float, ...] = ()
    """Quiescing and draining, for each checkpoint."""
    checkpoint_s: tuple[float, ...] = ()
    init_s: tuple[float, ...] = ()
    """MPI_Init, the slowest rank, for each start."""
    nic_bytes: tuple[int, ...] = ()
    """Bytes that left the hosts, for each stay on several."""
    early: bool = field(default=False)
    """The program ended before the chain did."""


def carried_python(program: str, steps: int, pause_s: float) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """How a program of ``programs/`` is carried; for `run_command`."""
    return (sys.executable, str(PROGRAMS / f"{program}.py"), str(steps), str(pause_s)), ENVIRONMENT


def run_command(argv: tuple[str, ...], environment: Mapping[str, str], configs: Sequence[Config], seed: int) -> Walk:
    """Start on the first configuration, restart on each of the others, and let it end on the last."""
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="remesh-chain-"))
    job = JobFolder.create(folder / "job", JobSpec(argv, NUM_RANKS, str(folder), dict(environment)))
    caught: Counter[str] = Counter()
    cut_s, checkpoint_s, init_s, nic_bytes = [], [], [], []
    checkpoint = None
    try:
        for place, config in enumerate(configs):
            is_last = place == len(configs) - 1
            stopper = Stopper(job, None if is_last else chance.uniform(0.05, 0.5))
            stay = run_job_once(job, config.placement, RunSettings(keep=1), checkpoint, stopper)
            init_s.append(max((seconds.get("mpi_init", 0.0) for seconds in stay.ready_seconds.values()), default=0.0))
            nic_bytes += [min(stay.nic_bytes.values())] if stay.nic_bytes else []
            if stay.outcome.state != "stopped":
                break
            told = stay.last_checkpoint
            assert told is not None
            caught.update(told["caught"])
            cut_s.append(told["seconds"]["cut"])
            checkpoint_s.append(told["seconds"]["total"])
            checkpoint = job.checkpoint(None)
        lines = (job.logs / "rank-0000.out").read_text().splitlines()
        answers = [line.partition(" ")[2] for line in lines if line.startswith("answer ")]
        events = (job.logs / "events.log").read_text() + (job.logs / "rank-0000.err").read_text()
        cause = f"{config}: {stay.outcome.cause}" if stay.outcome.state == "finished" else f"{config}: {events[-3000:]}"
        answer = answers[0] if len(answers) == 1 and stay.outcome.state == "finished" else ""
        return Walk(
            tuple(configs), answer, cause, caught, tuple(cut_s), tuple(checkpoint_s), tuple(init_s), tuple(nic_bytes),
            early=not is_last,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Stopper:
    """Asks for a checkpoint that stops, some time after the job has come up; ends a job that gets nowhere."""

    def __init__(self, job: JobFolder, after_s: float | None) -> None:
        self._after_s = after_s
        self._ready_s: float | None = None
        self._patience = Patience(job)

    def __call__(self, coordinator: Coordinator) -> None:
        now_s = time.monotonic()
        self._patience(coordinator)
        if self._after_s is None or not coordinator.all_ready:
            return
        self._ready_s = self._ready_s or now_s
        if now_s - self._ready_s >= self._after_s:
            self._after_s = None
            coordinator.request_checkpoint(stop=True)


def native_python(program: str, steps: int) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """How a program of ``programs/`` runs without us and without pauses; for `native_answer`."""
    numeric = str(Path(np.__file__).resolve().parents[1])
    argv = (find_mpi("mpich").python, str(PROGRAMS / f"{program}.py"), str(steps), "0")
    return argv, {"PYTHONPATH": numeric, "OMP_NUM_THREADS": "1"}


def native_answer(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """What the program answers without us, on a real MPI, uninterrupted."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    command = [find_mpi("mpich").launcher, "-n", str(NUM_RANKS), "env", *variables, *argv]
    with tempfile.TemporaryDirectory(prefix="remesh-native-") as folder:
        done = run_patiently(command, dict(os.environ), Path(folder))
    done.check_returncode()
    return next(line for line in done.stdout.splitlines() if line.startswith("answer ")).partition(" ")[2]


def all_pairs_walk(configs: Sequence[Config]) -> list[Config]:
    """A closed walk that goes from each configuration to each other one exactly once (an Eulerian circuit).

    >>> walk = all_pairs_walk(ALL[:3])
    >>> len(walk), len(set(zip(walk, walk[1:])))
    (7, 6)
    """
    unused = {config: [other for other in configs if other != config] for config in configs}
    stack, circuit = [configs[0]], []
    while stack:
        if unused[stack[-1]]:
            stack.append(unused[stack[-1]].pop(0))
        else:
            circuit.append(stack.pop())
    return circuit[::-1]
