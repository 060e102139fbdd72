"""What does a program pay when nothing happens? Small calls, bandwidth, and one call per millisecond, beside native.

Native and carried runs take turns on two ranks; each value is a ratio or difference of medians over the turns.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.report import Row, at_least, at_most
from benchmarks.transparent.chain import PROGRAMS
from remesh.transparent.coordinator import Coordinator, Settings
from remesh.transparent.job import JobFolder, JobSpec
from remesh.transparent.launch import Reach, plan_start
from remesh.transparent.mpis import find_mpi
from remesh.transparent.stay import Placement, run_stay

_ADDED_US = 6.0
_SIZES_MIB = (1, 8, 64)
_BANDWIDTH = {"shm": 0.5, "tcp": 0.8, "ofi": 0.8}
_OVERHEAD = 1.02
Measured = dict[str, float]


def rows(repeat: int, turns: int, networks: Iterable[tuple[str, str]]) -> list[Row]:
    """Rows of every MPI and network, on one host."""
    found = []
    for mpi, network in networks:
        native, carried = [], []
        for _ in range(turns):
            native.append(measure_native(mpi, network, repeat))
            carried.append(measure_carried(mpi, network, repeat))
        found += compare(f"{mpi} {network}", network, native, carried)
    return found


def compare(case: str, network: str, native: list[Measured], carried: list[Measured]) -> list[Row]:
    """Rows of one configuration."""

    def median(runs: list[Measured], name: str) -> float:
        return statistics.median(run[name] for run in runs)

    spread = max(run["latency"] for run in carried) / min(run["latency"] for run in carried) - 1
    found = []
    for name in ("latency", "allreduce"):
        added = (median(carried, name) - median(native, name)) * 1e6
        found.append(at_most(f"{case}: added to {name} of 8 bytes", added, "us", _ADDED_US, spread=spread))
    for mib in _SIZES_MIB:
        share = median(carried, f"bandwidth-{mib}") / median(native, f"bandwidth-{mib}")
        found.append(at_least(f"{case}: bandwidth, {mib} MiB", share, "ratio", _BANDWIDTH[network], peer="native"))
    ratio = median(carried, "worked") / median(native, "worked")
    found.append(at_most(f"{case}: work with one call per ms", ratio, "ratio", _OVERHEAD, peer="native"))
    found.append(Row(f"{case}: memory of a lower half", median(carried, "lower_bytes"), "bytes"))
    return found


def measure_native(mpi: str, network: str, repeat: int) -> Measured:
    """One run on the real MPI."""
    installation = find_mpi(mpi)
    command = (installation.python, str(PROGRAMS / "pingpong.py"), str(repeat))
    start = plan_start(installation, network, 2, (), Reach(), command)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **start.environment}
    done = subprocess.run(start.command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    return _read(done.stdout)


def measure_carried(mpi: str, network: str, repeat: int) -> Measured:
    """One run of the same program, carried."""
    folder = Path(tempfile.mkdtemp(prefix="remesh-costs-"))
    try:
        argv = (sys.executable, str(PROGRAMS / "pingpong.py"), str(repeat))
        job = JobFolder.create(folder / "job", JobSpec(argv, 2, str(folder), {"PATH": "/usr/bin:/bin"}))
        memory = LowerMemory()
        stay = run_stay(job, Placement(mpi, network), Settings(), None, lambda _: None, memory)
        if stay.outcome.state != "finished":
            raise RuntimeError(stay.outcome.cause)
        return _read((job.logs / "rank-0000.out").read_text()) | {"lower_bytes": float(memory.most_bytes)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class LowerMemory:
    """Watches a job: the most memory that the lower half of its rank 0 had, its share of shared pages included."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._next_s = 0.0

    def __call__(self, coordinator: Coordinator) -> None:
        now_s = time.monotonic()
        if not coordinator.all_ready or now_s < self._next_s:
            return
        # Reading it stops the process for a moment.
        self._next_s = now_s + 1.0
        pid = coordinator.describe()["ranks"][0]["pid"]
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            found = next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
            self.most_bytes = max(self.most_bytes, found)


def _read(text: str) -> Measured:
    return {name: float(value) for name, value in (line.split() for line in text.splitlines() if " " in line)}
