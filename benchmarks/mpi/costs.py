"""Overhead of carried programs without a checkpoint: small calls, bandwidth, a call per ms, beside native.

``python -m benchmarks.mpi.costs [MPI:NETWORK ...]`` (all of them in twelve minutes on a quiet machine, with ``QUICK=1``
in seven) writes the report of docs/mpi/measured.md. Parts are printed with the time that each took.

Programs in C are in :mod:`benchmarks.mpi.c_programs`: small calls, start and end, memory. Whole runs are in
:mod:`~benchmarks.mpi.whole_runs`, checkpoints and restarts in :mod:`~benchmarks.mpi.images`. The programs here are
Python.

Native and carried runs take turns, on two ranks; each value is a ratio or difference of medians over the turns. That of
a bandwidth is the median of the turns' ratios, since loopback is several times slower in some minutes than in others. A
lower half may not block, so it starts collectives and asks for their end; what that costs a native program is a row.
*With a copy on each side* is a native program that sends the same in pieces of 1 MiB and copies each as a lower half
must: the bound for plain arrays over a network. Loopback is as fast as memory, which no network of a user is: so large
messages are also measured between two hosts of a testbed, with links of a real rate. There they are sent in a row: the
first MiB after each pause passes a shaped link at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.mpi import c_programs, images, whole_runs
from benchmarks.mpi.chain import ENVIRONMENT, PROGRAMS
from benchmarks.report import Row, at_least, at_most, is_quick, spread_of, write_report
from remesh.carried.hosts.host_list import Host
from remesh.carried.hosts.job_hosts import make_testbed
from remesh.carried.mpi.launch import LaunchCommand, Reach, plan_start
from remesh.carried.mpi.mpi_job import Placement, RunSettings, reach_into, run_job_once
from remesh.carried.mpi.mpis import find_mpi
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from remesh.foundation.settings import SHARED_ARRAYS
from remesh.testbed.inside import command_inside
from tests.mpi.patience import run_patiently

_ADDED_TO_FILE_US = 8.0
_SIZES_MIB = (1, 8, 64)
_BANDWIDTH = {"shm": 0.5, "tcp": 0.8, "ofi": 0.8}
_SHARED_BANDWIDTH = 0.9
_OVERHEAD = 1.02
_MORE_TURNS = 1
"""For programs at work: what is sought is smaller than what runs differ by."""
ONE_HOST = (
    ("mpich", "shm"),
    ("openmpi", "shm"),
    ("impi", "shm"),
    ("openmpi", "tcp"),
    ("mpich", "ofi"),
    ("impi", "tcp"),
)
BETWEEN_HOSTS = (("openmpi", "tcp"), ("mpich", "ofi"))
_RATES = {"10gbit": "10 Gbit/s", "1gbit": "1 Gbit/s"}
_REPEAT_BETWEEN_HOSTS = 500
"""Of pingpong.py: a link of 1 Gbit/s takes half a second for the 64 MiB that it sends in each of 15 rows."""
_ALONE = {"fetched": "fetch-and-add of a window, with flush", "written": "write of 8 bytes to a file"}
"""Calls of one rank, told as they are: natively one is a write to shared memory, the other one a call of the system."""
Measured = dict[str, float]


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run the program."""

    mpi: str
    network: str
    repeat: int  # small calls in a batch
    num_ranks: int = 2
    parts: tuple[str, ...] = ()  # of pingpong.py; empty: all
    variables: Mapping[str, str] = field(default_factory=dict)  # of the program's environment
    rate: str | None = None  # of the links, if each rank has a host of its own; None: all are here

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the interpreter."""
        return str(PROGRAMS / "pingpong.py"), str(self.repeat), *self.parts

    @property
    def placement(self) -> Placement:
        """As `run_job_once` takes it."""
        hosts = () if self.rate is None else tuple(Host(f"host{rank}", 1) for rank in range(self.num_ranks))
        return Placement(self.mpi, self.network, hosts, self.rate)


def rows(repeat: int, turns: int, networks: Iterable[tuple[str, str]]) -> list[Row]:
    """Rows of every MPI and network, on one host."""
    found = []
    for mpi, network in networks:
        plain = Case(mpi, network, repeat, parts=("small", "large", "window", "file"))
        working = replace(plain, parts=("work",))
        shared = replace(plain, parts=("large",), variables={SHARED_ARRAYS.name: "1"})
        ways = {
            "native": (measure_native, plain),
            "copied": (measure_native, replace(plain, parts=("copied",))),
            "carried": (measure_carried, plain),
            "shared": (measure_carried, shared),
            "native at work": (measure_native, working),
            "carried at work": (measure_carried, working),
        }
        runs: dict[str, list[Measured]] = {way: [] for way in ways}
        for turn in range(turns + _MORE_TURNS):
            for way, (measure, case) in ways.items():
                if turn < turns or case is working:
                    runs[way].append(measure(case))
        found += compare(f"{mpi} {network}", network, runs)
    return found


def host_rows(rate: str, repeat: int, turns: int, networks: Iterable[tuple[str, str]] = BETWEEN_HOSTS) -> list[Row]:
    """Bandwidths between two hosts that a link of a rate joins."""
    found = []
    for mpi, network in networks:
        case = Case(mpi, network, repeat, parts=("row",), rate=rate)
        runs: dict[str, list[Measured]] = {"native": [], "carried": []}
        for _ in range(turns):
            runs["native"].append(measure_native(case))
            runs["carried"].append(measure_carried(case))
        name = f"{mpi} {network}, hosts at {_RATES[rate]}"
        found += bandwidth_rows(name, runs, "carried", _BANDWIDTH[network], measured="row")
        found += native_bandwidth_rows(name, runs, "row")
    return found


def rank_rows(turns: int, mpi: str = "mpich", network: str = "shm") -> list[Row]:
    """What one call per ms costs with fewer ranks than cores, and with more: a rank is two processes."""
    num_cores, found = len(os.sched_getaffinity(0)), []
    for num_ranks in sorted({max(1, num_cores // 2), 2 * num_cores}):
        case = Case(mpi, network, 1, num_ranks, ("work",))
        native, carried = beside_native(case, "worked", turns + _MORE_TURNS)
        name = f"{mpi} {network}: work with one call per ms, {num_ranks} ranks on {num_cores} cores"
        goal = _OVERHEAD if num_ranks <= num_cores else None
        found.append(at_most(name, carried / native, "ratio", goal, peer="native"))
    return found


def beside_native(case: Case, name: str, turns: int) -> tuple[float, float]:
    """Medians of one value over native and carried runs that take turns."""
    pairs = [(measure_native(case)[name], measure_carried(case)[name]) for _ in range(turns)]
    native, carried = (statistics.median(runs) for runs in zip(*pairs, strict=True))
    return native, carried


def compare(case: str, network: str, runs: Mapping[str, list[Measured]]) -> list[Row]:
    """Rows of one configuration."""

    def median(way: str, name: str) -> float:
        return statistics.median(run[name] for run in runs[way])

    latencies = [run["latency"] for run in runs["carried"]]
    spread = spread_of(latencies)
    found = []
    for name in ("latency", "allreduce"):
        added = (median("carried", name) - median("native", name)) * 1e6
        found.append(Row(f"{case}: added to {name} of 8 bytes, from Python", added, "us", spread=spread))
    without_blocking = (median("native", "iallreduce") - median("native", "allreduce")) * 1e6
    found.append(Row(f"{case}: added to allreduce of 8 bytes by native's own without blocking", without_blocking, "us"))
    for name, said in _ALONE.items():
        found += [Row(f"{case}: {said}, {way}", median(way, name) * 1e6, "us") for way in ("native", "carried")]
    added_to_file = (median("carried", "written") - median("native", "written")) * 1e6
    found.append(at_most(f"{case}: added to {_ALONE['written']}", added_to_file, "us", _ADDED_TO_FILE_US))
    found += bandwidth_rows(case, runs, "carried", _BANDWIDTH[network])
    found += bandwidth_rows(case, runs, "shared", _SHARED_BANDWIDTH, said=" of shared arrays")
    found += native_bandwidth_rows(case, runs)
    for mib in _SIZES_MIB if "copied" in runs else ():
        of_native = share_of_native(runs, "copied", f"copied-{mib}", f"bandwidth-{mib}")
        found.append(
            Row(f"{case}: bandwidth of native with a copy on each side, {mib} MiB", of_native, "ratio", peer="native")
        )
    ratio = median("carried at work", "worked") / median("native at work", "worked")
    found.append(at_most(f"{case}: work with one call per ms", ratio, "ratio", _OVERHEAD, peer="native"))
    beside_bytes = median("carried", "beside_bytes")
    found.append(Row(f"{case}: memory beside a program in Python, after messages of 64 MiB", beside_bytes, "bytes"))
    return found


def share_of_native(runs: Mapping[str, list[Measured]], way: str, name: str, peers: str) -> float:
    """Median over the turns of a value's ratio to native's of the same turn.

    Loopback has two speeds that differ by four, each for a minute or so: only runs of one turn can be compared.
    """
    pairs = zip(runs[way], runs["native"], strict=True)
    return statistics.median(run[name] / native[peers] for run, native in pairs)


def bandwidth_rows(
    case: str,
    runs: Mapping[str, list[Measured]],
    way: str,
    goal: float,
    *,
    said: str = "",
    measured: str = "bandwidth",
) -> Iterator[Row]:
    """What a way reaches of native's bandwidth, for each size; ``measured`` is its name in what pingpong.py tells."""
    for mib in _SIZES_MIB:
        one = f"{measured}-{mib}"
        ratio = share_of_native(runs, way, one, one)
        yield at_least(f"{case}: bandwidth{said}, {mib} MiB", ratio, "ratio", goal, peer="native")


def native_bandwidth_rows(case: str, runs: Mapping[str, list[Measured]], measured: str = "bandwidth") -> Iterator[Row]:
    """Native's own, for each size."""
    for mib in _SIZES_MIB:
        found = statistics.median(run[f"{measured}-{mib}"] for run in runs["native"])
        yield Row(f"{case}: native's bandwidth, {mib} MiB", found / 1e9, "GB/s")


def measure_native(case: Case) -> Measured:
    """One run on the real MPI."""
    with contextlib.ExitStack() as stack:
        start = _plan_native(case, stack)
        # Open MPI does not start without a home.
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **start.environment}
        done = run_patiently(start.command, environment)
    if done.returncode:
        raise RuntimeError(f"running {case} natively: it ended with {done.returncode}: {done.stderr[-2000:]}")
    return _read(done.stdout)


def _plan_native(case: Case, stack: contextlib.ExitStack) -> LaunchCommand:
    """The command of a native run, on hosts that are there until the stack is left."""
    installation = find_mpi(case.mpi)
    command = (installation.python, *case.arguments)
    if case.rate is None:
        return plan_start(installation, case.network, case.num_ranks, (), Reach(), command)
    bed = stack.enter_context(make_testbed(case.placement.hosts, case.rate))
    room = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="remesh-costs-")))
    reach, hosts = reach_into(bed, case.placement.hosts, room)
    start = plan_start(installation, case.network, case.num_ranks, hosts, reach, command)
    for path, text in start.files.items():
        Path(path).write_text(text)
    return replace(start, command=tuple(command_inside(bed.switch_entry, start.command)))


def measure_carried(case: Case) -> Measured:
    """One run of the same program, carried."""
    folder = Path(tempfile.mkdtemp(prefix="remesh-costs-"))
    try:
        argv = (sys.executable, *case.arguments)
        spec = JobSpec(argv, case.num_ranks, str(folder), ENVIRONMENT | dict(case.variables))
        job = JobFolder.create(folder / "job", spec)
        memory = c_programs.BesideMemory()
        stay = run_job_once(job, case.placement, RunSettings(), None, memory)
        if stay.outcome.state != "finished":
            raise RuntimeError(f"running {case}: {stay.outcome.cause}")
        return _read((job.logs / "rank-0000.out").read_text()) | {"beside_bytes": memory.most_bytes}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(text: str) -> Measured:
    return {name: float(value) for name, value in (line.split() for line in text.splitlines() if " " in line)}


@dataclass(frozen=True, slots=True)
class Turns:
    """How often each part is measured: as often as its values differ, and twelve minutes allow."""

    small: int
    """Small calls in C, start and end: short runs, differences of microseconds."""
    large: int
    whole: int
    hosts: int
    """Links of a real rate hardly differ."""


def parts(turns: Turns, repeat: int, networks: list[tuple[str, str]]) -> Mapping[str, Callable[[], list[Row]]]:
    """What is measured, in this order: first what matters most to those who run programs."""
    joined = [each for each in BETWEEN_HOSTS if each in networks]
    return {
        "whole runs": lambda: whole_runs.rows(turns.whole),
        "checkpoints and restarts": images.restart_rows,
        "small calls, start, memory, in C": lambda: c_programs.rows(repeat, turns.small, networks),
        "a rank that spins": lambda: c_programs.spinning_rows(turns.small, repeat),
        "calls and bandwidth from Python": lambda: rows(repeat, turns.large, networks),
        "more and fewer ranks than cores": lambda: rank_rows(turns.large),
        **{
            f"hosts at {said}": lambda rate=rate: host_rows(rate, _REPEAT_BETWEEN_HOSTS, turns.hosts, joined)
            for rate, said in _RATES.items()
        },
    }


def main(wanted: list[str]) -> None:
    """Measure the configurations ``mpi:network`` that are named, or all, and write the report."""
    networks = [(mpi, network) for mpi, network in ONE_HOST if not wanted or f"{mpi}:{network}" in wanted]
    quick = is_quick()
    turns = Turns(small=3, large=1, whole=1, hosts=1) if quick else Turns(small=5, large=2, whole=3, hosts=1)
    found = []
    for said, measure in parts(turns, 500 if quick else 1000, networks).items():
        began_s = time.monotonic()
        found += measure()
        print(f"{said}: measured in {time.monotonic() - began_s:.0f} s", flush=True)
    missing = whole_runs.find_missing()
    notes = [f"not run, for want of `make mpi-programs`: {', '.join(missing)}"] if missing else []
    write_report("mpi_costs", found, notes=notes)


if __name__ == "__main__":
    main(sys.argv[1:])
