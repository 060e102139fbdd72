"""Times of checkpoints and restarts, beside what the disk and the data allow.

Each rank holds many megabytes. The bound of a checkpoint is the time in which as many bytes are written and flushed to
the same disk, in one file for each rank; it is measured right before each checkpoint, by ``write`` through the page
cache, and past it. Run alone, it measures larger jobs, of up to 1 GiB for each rank, in about four minutes:
``python -m benchmarks.mpi.images``.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.mpi.chain import ENVIRONMENT, PROGRAMS
from benchmarks.report import Row, at_most, is_quick, median_of, write_report
from remesh.carried.mpi.launch import SHM, Reach, plan_start
from remesh.carried.mpi.mpi_job import JobRun, Placement, RunSettings, run_job_once
from remesh.carried.mpi.mpis import KINDS, find_mpi
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from remesh.carried.rounds.leader import Coordinator
from tests.mpi.patience import run_patiently

_MIB = 1 << 20
_BLOCK_BYTES = 8 * _MIB
_NUM_OBJECTS = 1000
_OVER_WRITING = 1.25
_LARGE_MIB = 1000
"""From so many for each rank on a restart shall take little more than reading them."""
_TIMED_INIT = """
import time
began_s = time.monotonic()
from mpi4py import MPI
print(time.monotonic() - began_s, flush=True)
"""
_CHANGING_S = 1.0
"""Between checkpoints: several times what the program takes to change all that it changes."""
_LONGEST_S = 120.0
"""For a checkpoint: one that was given up is not told."""


@dataclass(slots=True)
class _Take:
    """Asks for checkpoints one after the other, once the program says that it is there; the last one stops."""

    out: Path
    left: int
    before: Callable[[], None] = lambda: None
    """Called right before each is asked for."""
    taken: list[dict] = field(default_factory=list)
    _asked: int = 0
    _asked_s: float = 0.0

    def __call__(self, coordinator: Coordinator) -> None:
        told = coordinator.last_checkpoint
        if told is not None and told not in self.taken:
            self.taken.append(told)
        is_there = coordinator.all_ready and self.out.exists() and b"there" in self.out.read_bytes()
        if is_there and self.left and len(self.taken) == self._asked:
            self.before()
            self.left -= 1
            self._asked += 1
            self._asked_s = time.monotonic()
            coordinator.request_checkpoint(stop=not self.left)
        elif len(self.taken) < self._asked and time.monotonic() - self._asked_s > _LONGEST_S:
            raise RuntimeError(f"checkpoint {self._asked} was not committed within {_LONGEST_S:g} s; see the job's log")


def _stay(job: JobFolder, mpi: str, settings: RunSettings, take: _Take) -> JobRun:
    """One stay, from the last checkpoint if there is one."""
    checkpoint = job.checkpoint(None) if job.checkpoints() else None
    stay = run_job_once(job, Placement(mpi), settings, checkpoint, take)
    if stay.last_checkpoint is None:
        raise RuntimeError(stay.outcome.cause)
    if stay.last_checkpoint not in take.taken:
        take.taken.append(dict(stay.last_checkpoint))
    return stay


def rows(mib: int, num_ranks: int = 2, repeat: int = 5) -> list[Row]:
    """Full checkpoints, those of what a tenth of the pages changed, and restarts."""
    folder = Path(tempfile.mkdtemp(prefix="remesh-images-"))
    try:
        argv = (sys.executable, str(PROGRAMS / "heavy.py"), str(mib), "0.1", "3600")
        job = JobFolder.create(folder / "job", JobSpec(argv, num_ranks, str(folder), ENVIRONMENT))
        out = job.logs / "rank-0000.out"
        plain_s: list[float] = []
        direct_s: list[float] = []

        def measure_bounds() -> None:
            plain_s.append(write_as_much(folder, mib, num_ranks))
            direct_s.append(write_as_much(folder, mib, num_ranks, os.O_DIRECT))

        full = _Take(out, repeat + 1, measure_bounds)
        parts = _Take(out, repeat + 1, lambda: time.sleep(_CHANGING_S))
        _stay(job, "mpich", RunSettings(keep=1), full)
        on_openmpi = _stay(job, "openmpi", RunSettings(incremental=True, keep=1), parts)
        on_mpich = _stay(job, "mpich", RunSettings(keep=1), _Take(out, 1))
        name = f"{num_ranks} x {mib} MiB"
        return [
            *_full_rows(name, full.taken, plain_s, direct_s),
            *_increment_rows(name, full.taken, parts.taken),
            *_restart_rows(name, "openmpi", on_openmpi, is_large=mib >= _LARGE_MIB),
            *_restart_rows(name, "mpich", on_mpich, is_large=mib >= _LARGE_MIB),
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _full_rows(name: str, taken: list[dict], plain_s: list[float], direct_s: list[float]) -> list[Row]:
    """The first one also hashes all mapped files, and is no part of the medians."""
    totals = [each["seconds"]["total"] for each in taken]
    against = [total / bound for total, bound in zip(totals, plain_s, strict=True)]
    past_cache = [total / bound for total, bound in zip(totals, direct_s, strict=True)]
    cuts = [each["seconds"]["cut"] for each in taken]
    return [
        median_of(f"{name}: checkpoint over write and fsync", against[1:], "ratio", _OVER_WRITING, bound=1.0),
        Row(f"{name}: the first checkpoint over write and fsync", against[0], "ratio"),
        median_of(f"{name}: checkpoint over write past the page cache and fsync", past_cache[1:], "ratio", bound=1.0),
        median_of(f"{name}: quiesce and drain", cuts, "s", 0.1),
        median_of(f"{name}: checkpoint", totals[1:], "s"),
        median_of(f"{name}: images in it", [each["seconds"]["images"] for each in taken[1:]], "s"),
    ]


def _increment_rows(name: str, full: list[dict], parts: list[dict]) -> list[Row]:
    """Against the median of the full ones; the first of a stay is full, since tracking begins with it."""
    whole_s = statistics.median(each["seconds"]["total"] for each in full[1:])
    whole_images_s = statistics.median(each["seconds"]["images"] for each in full[1:])
    sizes = [part["num_bytes"] / full[-1]["num_bytes"] for part in parts[1:]]
    times = [part["seconds"]["total"] / whole_s for part in parts[1:]]
    images = [part["seconds"]["images"] / whole_images_s for part in parts[1:]]
    return [
        median_of(f"{name}: size with 10 % changed over full", sizes, "ratio", 0.15),
        median_of(f"{name}: time with 10 % changed over full", times, "ratio", 0.15),
        median_of(f"{name}: images in it, over those of full", images, "ratio"),
    ]


def restart_rows(mib: int = _LARGE_MIB, num_ranks: int = 1) -> list[Row]:
    """A checkpoint beside writing its bytes, and the share of MPI in a restart under each MPI, of a large job."""
    folder = Path(tempfile.mkdtemp(prefix="remesh-restarts-"))
    try:
        argv = (sys.executable, str(PROGRAMS / "heavy.py"), str(mib), "0.1", "3600")
        job = JobFolder.create(folder / "job", JobSpec(argv, num_ranks, str(folder), ENVIRONMENT))
        out, bounds_s = job.logs / "rank-0000.out", []
        first = _Take(out, 3, lambda: bounds_s.append(write_as_much(folder, mib, num_ranks)))
        _stay(job, "mpich", RunSettings(keep=1), first)
        name = f"{num_ranks} x {mib} MiB"
        # The first one also hashes all mapped files.
        ratios = [each["seconds"]["total"] / bound for each, bound in zip(first.taken, bounds_s, strict=True)][1:]
        found = [median_of(f"{name}: checkpoint over write and fsync", ratios, "ratio", _OVER_WRITING, bound=1.0)]
        for mpi in KINDS:
            stay = _stay(job, mpi, RunSettings(keep=1), _Take(out, 1))
            native_s = native_init_s(mpi, num_ranks)
            found += _restart_rows(name, mpi, stay, is_large=mib >= _LARGE_MIB, native_s=native_s)
            found.append(Row(f"{name}: MPI_Init of a native program under {mpi}", native_s, "s"))
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _restart_rows(name: str, mpi: str, stay: JobRun, *, is_large: bool, native_s: float | None = None) -> list[Row]:
    """The share of MPI in a restart has a goal where there is much to restore, and its bound with ``native_s``."""
    phases = list(stay.ready_seconds.values())
    replay_s = max(each.get("replay", 0.0) for each in phases)
    init_s = max(each.get("mpi_init", 0.0) + each.get("replay", 0.0) for each in phases)
    upper_s = max(each.get("upper", 0.0) for each in phases)
    share, what = init_s / (init_s + upper_s), f"{name}: MPI_Init and replay in a restart under {mpi}"
    bound = None if native_s is None else native_s / (native_s + upper_s)
    return [
        at_most(f"{name}: replay under {mpi}", replay_s, "s", 0.05),
        at_most(what, share, "share", 0.1 if is_large else None, bound=bound),
        Row(f"{name}: restart under {mpi}", init_s + upper_s, "s"),
    ]


def native_init_s(mpi: str, num_ranks: int, repeat: int = 3) -> float:
    """The bound of a restart's share: the slowest rank's, the median of some runs."""
    installation = find_mpi(mpi)
    start = plan_start(installation, SHM, num_ranks, (), Reach(), (installation.python, "-c", _TIMED_INIT))
    environment = os.environ | dict(start.environment)
    runs = [run_patiently(start.command, environment) for _ in range(repeat)]
    for run in runs:
        run.check_returncode()
    return statistics.median(max(map(float, run.stdout.split())) for run in runs)


def object_rows(num_objects: int = _NUM_OBJECTS) -> list[Row]:
    """Replay of many objects: in the restart itself, and what the first use of each costs more than the second."""
    folder = Path(tempfile.mkdtemp(prefix="remesh-objects-"))
    found = []
    try:
        for before, after in (("openmpi", "mpich"), ("mpich", "openmpi")):
            argv = (sys.executable, str(PROGRAMS / "objects.py"), str(num_objects))
            job = JobFolder.create(folder / after, JobSpec(argv, 2, str(folder), ENVIRONMENT))
            out = job.logs / "rank-0000.out"
            _stay(job, before, RunSettings(keep=1), _Take(out, 1))
            stay = run_job_once(job, Placement(after), RunSettings(keep=1), job.checkpoint(None))
            if stay.outcome.state != "finished":
                raise RuntimeError(stay.outcome.cause)
            told = dict(line.split() for line in out.read_text().splitlines() if " " in line)
            replay_s = max(each.get("replay", 0.0) for each in stay.ready_seconds.values())
            first_s = max(float(told["first"]) - float(told["second"]), 0.0)
            name = f"{num_objects} communicators and datatypes, restart under {after}"
            found += [
                at_most(f"{name}: replay and all first uses", replay_s + first_s, "s", 0.05 + 0.001 * num_objects),
                Row(f"{name}: replay alone", replay_s, "s"),
            ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def write_as_much(folder: Path, mib: int, num_ranks: int, flags: int = 0) -> float:
    """Seconds to write and flush the same bytes in large blocks, one thread for each rank."""
    block = memoryview(mmap.mmap(-1, min(_BLOCK_BYTES, mib * _MIB)))
    block[:] = os.urandom(len(block))

    def write(rank: int) -> None:
        descriptor = os.open(folder / f"bound-{rank}", os.O_WRONLY | os.O_CREAT | flags, 0o600)
        for _ in range(-(-mib * _MIB // len(block))):
            os.write(descriptor, block)
        os.fsync(descriptor)
        os.close(descriptor)

    start_s = time.monotonic()
    with ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(write, range(num_ranks)))
    taken_s = time.monotonic() - start_s
    for rank in range(num_ranks):
        (folder / f"bound-{rank}").unlink()
    return taken_s


def main() -> None:
    """Measure, and write the report; needs 4 GiB of memory and 8 GiB of disk."""
    cases = ((64, 2, 5),) if is_quick() else ((256, 2, 5), (256, 4, 5), (1024, 1, 3), (1024, 2, 3))
    found = []
    for mib, num_ranks, repeat in cases:
        began_s = time.monotonic()
        found += rows(mib, num_ranks, repeat)
        print(f"{num_ranks} x {mib} MiB: measured in {time.monotonic() - began_s:.0f} s", flush=True)
    write_report("mpi_images", [*found, *object_rows()])


if __name__ == "__main__":
    main()
