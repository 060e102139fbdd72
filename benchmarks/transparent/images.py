"""How long do checkpoints and restarts take, beside what the disk and the data allow?

Two ranks hold many megabytes each. The bound of a checkpoint is the time in which the same number of bytes is written
and flushed to the same disk, in one file for each rank, right before.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.report import Row, at_most
from benchmarks.transparent.chain import PROGRAMS
from remesh.transparent.coordinator import Coordinator, Settings
from remesh.transparent.job import JobFolder, JobSpec
from remesh.transparent.stay import Placement, run_stay

_NUM_RANKS = 2
_MIB = 1 << 20


class _Take:
    """Asks for checkpoints one after the other, once the program says that it is there; the last one stops."""

    def __init__(self, job: JobFolder, count: int) -> None:
        self._out = job.logs / "rank-0000.out"
        self._left = count
        self.taken: list[dict] = []

    def __call__(self, coordinator: Coordinator) -> None:
        told = coordinator.last_checkpoint
        if told is not None and told not in self.taken:
            self.taken.append(told)
        is_there = coordinator.all_ready and self._out.exists() and b"there" in self._out.read_bytes()
        if is_there and self._left and len(self.taken) == self._asked:
            self._left -= 1
            self._asked += 1
            coordinator.request_checkpoint(stop=not self._left)

    _asked = 0


def rows(mib: int) -> list[Row]:
    """A full checkpoint, one of what a tenth of the pages changed, and a restart."""
    folder = Path(tempfile.mkdtemp(prefix="remesh-images-"))
    try:
        argv = (sys.executable, str(PROGRAMS / "heavy.py"), str(mib), "0.1", "600")
        environment = {"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1"}
        job = JobFolder.create(folder / "job", JobSpec(argv, _NUM_RANKS, str(folder), environment))
        bound_s = write_as_much(folder, mib)
        take = _Take(job, 3)
        first = run_stay(job, Placement("mpich"), Settings(incremental=True, keep=1), None, print, take)
        if first.last_checkpoint is not None and first.last_checkpoint not in take.taken:
            take.taken.append(dict(first.last_checkpoint))
        full, *rest = take.taken
        increment = rest[-1]
        again = _Take(job, 1)
        restarted = run_stay(job, Placement("openmpi"), Settings(keep=1), job.checkpoint(None), print, again)
        phases = list(restarted.ready_seconds.values())
        init_s = max(each.get("mpi_init", 0.0) + each.get("replay", 0.0) for each in phases)
        upper_s = max(each.get("upper", 0.0) for each in phases)
        name = f"{_NUM_RANKS} ranks of {mib} MiB"
        return [
            at_most(f"{name}: checkpoint over write and fsync", full["seconds"]["total"] / bound_s, "ratio", 1.25,
                    bound=1.0),
            at_most(f"{name}: quiesce and drain", full["seconds"]["cut"], "s", 0.1),
            at_most(f"{name}: size with 10 % changed over full", increment["num_bytes"] / full["num_bytes"], "ratio",
                    0.15),
            at_most(f"{name}: time with 10 % changed over full",
                    increment["seconds"]["total"] / full["seconds"]["total"], "ratio", 0.15),
            at_most(f"{name}: replay", max(each.get("replay", 0.0) for each in phases), "s", 0.05),
            at_most(f"{name}: MPI_Init and replay in a restart", init_s / (init_s + upper_s), "share", 0.1),
            Row(f"{name}: restart", init_s + upper_s, "s"),
        ]  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_as_much(folder: Path, mib: int) -> float:
    """Seconds to write and flush the same bytes, one thread for each rank."""
    block = os.urandom(_MIB)

    def write(rank: int) -> None:
        with (folder / f"bound-{rank}").open("wb") as file:
            for _ in range(mib):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    start_s = time.monotonic()
    with ThreadPoolExecutor(_NUM_RANKS) as pool:
        list(pool.map(write, range(_NUM_RANKS)))
    taken_s = time.monotonic() - start_s
    for rank in range(_NUM_RANKS):
        (folder / f"bound-{rank}").unlink()
    return taken_s
