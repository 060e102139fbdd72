"""Overhead of programs in C on a rank: small calls, start and end, memory beside the program.

Native and carried runs of one program take turns, as in :mod:`benchmarks.mpi.costs`. Start and end are processor time,
of all processes together: the machine's clock would include what else runs. Python finds its modules compiled, as an
installation leaves them. The memory beside a program is that of its lower half and its init, each with its share of
what processes share; the MPI library is in it, which a native program has inside.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from unittest import mock

from benchmarks.report import Row, at_most
from remesh.carried.mpi.launch import Reach, plan_start
from remesh.carried.mpi.library.build import LIBRARIES
from remesh.carried.mpi.mpi_job import Placement, RunSettings, run_job_once
from remesh.carried.mpi.mpis import Installation, find_mpi
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from remesh.carried.rounds.leader import Coordinator
from remesh.foundation.linux.procfs import children_of, family_of
from remesh.foundation.settings import SPIN
from tests.mpi.patience import run_patiently

_ROOT: Final = Path(__file__).resolve().parents[2]
_SOURCE: Final = _ROOT / "tests" / "mpi" / "programs" / "c" / "small_calls.c"
_SWITCHES: Final = Path(__file__).with_name("switches.c")
_ADDED_US: Final = {"latency": 2.5, "allreduce": 3.5}
_ADDED_SPINNING_US: Final = 0.9
_ADDED_LOCAL_NS: Final = 30.0
_LOCAL: Final = {"rank": "Comm_rank", "time": "Wtime", "size": "Type_size"}
_START_S: Final = 0.3
_MEMORY_BYTES: Final = 26e6
_STAY_S: Final = 3
"""How long a program whose memory is looked at does nothing."""
Measured = dict[str, float]


@dataclass(frozen=True, slots=True)
class CCase:
    """One way to run the program."""

    installation: Installation
    network: str
    program: Path
    num_ranks: int = 2
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def argv(self) -> tuple[str, ...]:
        return str(self.program), *self.arguments

    @property
    def name(self) -> str:
        """As rows name it."""
        return f"{self.installation.kind} {self.network}"


def rows(repeat: int, turns: int, networks: Iterable[tuple[str, str]]) -> list[Row]:
    """Rows of every MPI and network, on one host."""
    found = []
    with tempfile.TemporaryDirectory(prefix="remesh-c-costs-") as folder, _compiled_modules(Path(folder)):
        switches = switch_row(Path(folder), repeat)
        for mpi, network in networks:
            installation = find_mpi(mpi)
            program = compile_program(installation, Path(folder) / f"small-{mpi}")
            case = CCase(installation, network, program, arguments=(str(repeat),))
            found += [
                *small_rows(case, turns, switches.value),
                *start_rows(case, turns, Path(folder)),
                *memory_rows(case),
            ]
        found.append(switches)
    return found


@contextlib.contextmanager
def _compiled_modules(folder: Path) -> Iterator[None]:
    """Every Python that is started finds its modules compiled, from the second one on."""
    with mock.patch.dict(os.environ, PYTHONPYCACHEPREFIX=str(folder / "compiled")):
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        yield


def compile_program(installation: Installation, into: Path, source: Path = _SOURCE, *more: str) -> Path:
    """A program, linked with this MPI's own library, and with ``more``."""
    place = Path(installation.launcher).parents[1]
    kind = installation.kind
    headers = place if kind != "impi" else Path(find_mpi("mpich").launcher).parents[1]  # its ABI is MPICH's
    library = LIBRARIES["openmpi" if kind == "openmpi" else "mpich"]
    compile_c(source, into, "-I", str(headers / "include"), f"-L{headers / 'lib'}", f"-l:{library}", *more)
    return into


def compile_c(source: Path, into: Path, *options: str) -> None:
    """A program in C; RuntimeError with the compiler's words."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    command = [*compiler, "-O2", str(source), "-o", str(into), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling {source.name}: {done.stderr}")


def small_rows(case: CCase, turns: int, switches_us: float) -> list[Row]:
    """What carrying adds to small calls; ``switches_us``: two switches, which a call of a lower half takes."""
    native, carried = _medians([(run_native(case), run_carried(case)) for _ in range(turns)])
    # A lower half may not block, and takes messages from anybody.
    bounds_us = {name: (native["unblocked"] - native[name]) * 1e6 + switches_us for name in _ADDED_US}
    found = [
        replace(_added(f"{case.name}: added to {name} of 8 bytes", name, native, carried), bound=bounds_us[name])
        for name in _ADDED_US
    ]
    # Halves that spin keep each other out where each has no core of its own.
    if len(os.sched_getaffinity(0)) >= 2 * case.num_ranks:
        spinning = replace(case, variables={SPIN.name: "1"})
        carried_spinning = _median([run_carried(spinning) for _ in range(turns)])
        for name in _ADDED_US:
            said = f"{case.name}: added to {name} of 8 bytes, spinning"
            found.append(_added(said, name, native, carried_spinning, _ADDED_SPINNING_US))
    for name, call in _LOCAL.items():
        added_ns = (carried[name] - native[name]) * 1e9
        found.append(at_most(f"{case.name}: added to {call}", added_ns, "ns", _ADDED_LOCAL_NS))
    return found


def _added(said: str, name: str, native: Measured, carried: Measured, goal: float | None = None) -> Row:
    return at_most(said, (carried[name] - native[name]) * 1e6, "us", _ADDED_US[name] if goal is None else goal)


def spinning_rows(turns: int, repeat: int, mpi: str = "mpich", network: str = "shm") -> list[Row]:
    """What a small call costs a rank that has a core for each of its halves, so that both may spin."""
    if len(os.sched_getaffinity(0)) < 2:
        return []
    with tempfile.TemporaryDirectory(prefix="remesh-c-costs-") as folder:
        installation = find_mpi(mpi)
        program = compile_program(installation, Path(folder) / "small")
        case = CCase(installation, network, program, 1, (str(repeat),), {SPIN.name: "1"})
        native, carried = _medians([(run_native(case), run_carried(case)) for _ in range(turns)])
    added_us = (carried["alone"] - native["alone"]) * 1e6
    said = "added to allreduce of 8 bytes of one rank alone, spinning"
    return [at_most(f"{case.name}: {said}", added_us, "us", _ADDED_SPINNING_US)]


def _medians(runs: Sequence[tuple[Measured, Measured]]) -> tuple[Measured, Measured]:
    """Of each value, over native and over carried runs."""
    native, carried = zip(*runs, strict=True)
    return _median(native), _median(carried)


def _median(runs: Sequence[Measured]) -> Measured:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def start_rows(case: CCase, turns: int, folder: Path) -> list[Row]:
    """Processor time of a program that does nothing, all processes together, over native and for each rank."""
    environment = {**os.environ, "REMESH_JOBS": str(folder / "jobs")}
    where = ("-n", str(case.num_ranks), "--mpi", case.installation.kind, "--network", case.network)
    command = [sys.executable, "-m", "remesh", "mpi", "run", *where, str(case.program), "1"]
    _processor_s(command, environment)  # compiles
    native = statistics.median(_processor_s(*_native(case, "1")) for _ in range(turns))
    carried = statistics.median(_processor_s(command, environment) for _ in range(turns))
    said = f"{case.name}: start and end, processor time added per rank"
    return [at_most(said, (carried - native) / case.num_ranks, "s", _START_S)]


def _processor_s(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """What the command and all that it started took; each is waited for by its parent."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_patiently(command, environment, _ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"running {command}: it ended with {done.returncode}: {done.stderr[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def memory_rows(case: CCase) -> list[Row]:
    """Memory of what stands beside a program, and what MPI takes in a native one."""
    watch = BesideMemory()
    still = replace(case, arguments=(*case.arguments, str(_STAY_S)))
    run_carried(still, watch)
    said = "the MPI library alone, in a native program"
    return [
        at_most(f"{case.name}: memory beside the program", watch.most_bytes, "bytes", _MEMORY_BYTES),
        Row(f"{case.name}: memory of {said}", native_memory(still), "bytes"),
    ]


class BesideMemory:
    """Watches a job: the most memory that stood beside the program of its rank 0, shares of shared pages included."""

    def __init__(self) -> None:
        self.most_bytes = 0.0
        self._next_s = 0.0

    def __call__(self, coordinator: Coordinator) -> None:
        now_s = time.monotonic()
        if not coordinator.all_ready or now_s < self._next_s:
            return
        # Reading it stops the process for a moment.
        self._next_s = now_s + 1.0
        lower = int(coordinator.describe()["ranks"][0]["pid"])
        with contextlib.suppress(OSError):
            self.most_bytes = max(self.most_bytes, sum(map(memory_of, (lower, *children_of(lower)))))


def memory_of(pid: int) -> float:
    """Bytes of a process, its share of shared pages included; OSError if it has ended."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(float(int(line.split()[1]) << 10) for line in lines if line.startswith("Pss:"))


def native_memory(case: CCase) -> float:
    """The median over the ranks of a native run, once they do nothing."""
    command, environment = _native(case, *case.arguments)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    most: dict[int, float] = {}
    while process.poll() is None:
        for pid in family_of(process.pid):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == case.program.name:
                    most[pid] = max(most.get(pid, 0.0), memory_of(pid))
        time.sleep(0.5)
    return statistics.median(most.values())


def switch_row(folder: Path, repeat: int) -> Row:
    """What a call of the lower half costs at least where both halves share a core."""
    compile_c(_SWITCHES, folder / "switches")
    said = subprocess.run([folder / "switches", str(10 * repeat)], capture_output=True, text=True, check=True).stdout
    return Row("two switches between two processes on one core", _read(said)["switches"] * 1e6, "us")


def _native(case: CCase, *arguments: str) -> tuple[list[str], dict[str, str]]:
    start = plan_start(case.installation, case.network, case.num_ranks, (), Reach(), (str(case.program), *arguments))
    library = library_folder(case.installation)
    # Open MPI does not start without a home.
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "LD_LIBRARY_PATH": str(library)}
    return list(start.command), {**environment, **start.environment}


def library_folder(installation: Installation) -> Path:
    """Where the MPI's own libraries are, which a program that is linked with them needs to be told."""
    return Path(installation.launcher).parents[1] / "lib"


def run_native(case: CCase) -> Measured:
    """One run on the real MPI."""
    command, environment = _native(case, *case.arguments)
    done = run_patiently(command, environment)
    if done.returncode:
        raise RuntimeError(f"running {case} natively: it ended with {done.returncode}: {done.stderr[-2000:]}")
    return _read(done.stdout)


def run_carried(case: CCase, watch: BesideMemory | None = None) -> Measured:
    """One run of the same program, carried."""
    folder = Path(tempfile.mkdtemp(prefix="remesh-c-costs-"))
    try:
        environment = {"PATH": "/usr/bin:/bin", **case.variables}
        job = JobFolder.create(folder / "job", JobSpec(case.argv, case.num_ranks, str(folder), environment))
        placement = Placement(case.installation.kind, case.network)
        stay = run_job_once(job, placement, RunSettings(), None, watch)
        if stay.outcome.state != "finished":
            raise RuntimeError(f"running {case}: {stay.outcome.cause}")
        return _read((job.logs / "rank-0000.out").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(text: str) -> Measured:
    return {name: float(value) for name, value in (line.split() for line in text.splitlines() if " " in line)}
