"""Whole runs of programs, carried beside native, from the first step to the last.

GROMACS and LAMMPS are Debian's (`make mpi-programs`), which others wrote and built: natively on the Open MPI of their
maker, carried on the wheel's. ``cg.c`` and ``hydro.c`` do what HPCG and LULESH do, on one MPI both ways. Each reports
by its own clock how long its steps took, so start and end, which have rows of their own, are not in it. Turns
alternate, and a ratio is the median of the turns' ratios: what is sought is smaller than what minutes differ by.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.mpi.c_programs import CCase, compile_program, run_carried, run_native
from benchmarks.report import Row, median_of
from remesh.carried.mpi.mpi_job import Placement, RunSettings, run_job_once
from remesh.carried.mpi.mpis import find_mpi
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from tests.mpi.debian import ROOT
from tests.mpi.debian_programs import INPUTS as DEBIAN_INPUTS, argon, variables
from tests.mpi.patience import run_patiently

_LONGER: Final = 1.01
_HERE: Final = Path(__file__).parent
_NUM_RANKS: Final = 2
_NUM_ATOMS: Final = 27_000
"""Of argon, for GROMACS: what one rank is given in the small runs of its users."""
_MELT_CELLS: Final = 16
"""In each dim, four atoms in each, for LAMMPS."""
_AS_ROOT: Final = {f"OMPI_ALLOW_RUN_AS_ROOT{suffix}": "1" for suffix in ("", "_CONFIRM")}
_LAUNCH: Final = ("--bind-to", "none", "--mca", "plm", "isolated", "--mca", "pml", "ob1", "--mca", "btl", "self,vader")


@dataclass(frozen=True, slots=True)
class DebianRun:
    """A program of others: how it is prepared, and where it tells the time that its steps took."""

    said: str
    program: str
    prepare: Callable[[Path, int], list[str]]
    """Writes its input for a number of steps into a folder; returns the arguments."""
    time_file: str
    """In the folder; "" for what rank 0 prints."""
    pattern: str
    num_steps: int


def _prepare_melt(folder: Path, num_steps: int) -> list[str]:
    text = (DEBIAN_INPUTS / "melt.lammps").read_text()
    text = text.replace("0 6 0 6 0 6", " ".join([f"0 {_MELT_CELLS}"] * 3)).replace("3000", str(num_steps))
    (folder / "melt.lammps").write_text(text)
    return ["-in", "melt.lammps", "-log", "none"]


def _prepare_argon(folder: Path, num_steps: int) -> list[str]:
    return argon(folder, _NUM_ATOMS, num_steps)


DEBIAN_RUNS: Final = (
    DebianRun("GROMACS", "gmx_mpi", _prepare_argon, "argon.log", r"^ +Time: +[\d.]+ +([\d.]+)", 400),
    DebianRun("LAMMPS", "lmp", _prepare_melt, "", r"^Loop time of ([\d.]+)", 400),
)
OWN_RUNS: Final = (("CG as HPCG has it", "cg", (104, 200)), ("a gas as LULESH has it", "hydro", (45, 600)))
"""What rows say, the source, and its arguments: the side of a rank's box, and steps."""


def rows(turns: int, share: float = 1.0) -> list[Row]:
    """Rows of all programs that are here; ``share`` of their steps are taken."""
    here = [run for run in DEBIAN_RUNS if run.said not in find_missing()]
    found = [
        _row(run.said, [_debian_turn(run, max(1, round(share * run.num_steps))) for _ in range(turns)]) for run in here
    ]
    return [*found, *_own_rows(turns, share)]


def find_missing() -> list[str]:
    """The programs of others that are not here, as rows name them."""
    return [run.said for run in DEBIAN_RUNS if not (ROOT / "usr/bin" / run.program).exists()]


def _row(said: str, turns: Sequence[tuple[float, float]]) -> Row:
    ratios = [carried_s / native_s for native_s, carried_s in turns]
    return median_of(f"openmpi shm: whole run of {said}", ratios, "ratio", _LONGER, peer="native")


def _own_rows(turns: int, share: float) -> Iterator[Row]:
    installation = find_mpi("openmpi")
    with tempfile.TemporaryDirectory(prefix="remesh-whole-") as folder:
        for said, name, (side, num_steps) in OWN_RUNS:
            program = compile_program(installation, Path(folder) / name, _HERE / f"{name}.c", "-lm")
            arguments = (str(side), str(max(1, round(share * num_steps))))
            case = CCase(installation, "shm", program, _NUM_RANKS, arguments)
            yield _row(said, [(run_native(case)["worked"], run_carried(case)["worked"]) for _ in range(turns)])


def _debian_turn(run: DebianRun, num_steps: int) -> tuple[float, float]:
    """Seconds of its steps, natively and carried."""
    return _of_both(run, num_steps, _run_natively), _of_both(run, num_steps, _run_carried)


def _of_both(run: DebianRun, num_steps: int, way: Callable[[Path, list[str]], str]) -> float:
    with tempfile.TemporaryDirectory(prefix="remesh-whole-") as place:
        folder = Path(place)
        printed = way(folder, [str(ROOT / "usr/bin" / run.program), *run.prepare(folder, num_steps)])
        text = (folder / run.time_file).read_text() if run.time_file else printed
    told = re.search(run.pattern, text, re.MULTILINE)
    if told is None:
        raise RuntimeError(f"running {run.said}: its output has no line {run.pattern!r}: {text[-2000:]}")
    return float(told[1])


def _run_natively(folder: Path, command: list[str]) -> str:
    """Run it on Debian's own Open MPI; what it printed."""
    environment = variables()
    own = ROOT / "usr/lib/x86_64-linux-gnu/openmpi/lib"
    # A launcher of Debian's finds its parts below its prefix.
    environment |= {"LD_LIBRARY_PATH": f"{environment['LD_LIBRARY_PATH']}:{own}", "OPAL_PREFIX": str(ROOT / "usr")}
    launch = [str(ROOT / "usr/bin/mpiexec.openmpi"), *_LAUNCH, "-n", str(_NUM_RANKS)]
    done = run_patiently([*launch, *command], os.environ | environment | _AS_ROOT, folder)
    if done.returncode:
        raise RuntimeError(f"running {command} natively: it ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _run_carried(folder: Path, command: list[str]) -> str:
    job = JobFolder.create(folder / "job", JobSpec(tuple(command), _NUM_RANKS, str(folder), variables()))
    stay = run_job_once(job, Placement("openmpi", "shm"), RunSettings(), None)
    if stay.outcome.state != "finished":
        raise RuntimeError(f"running {command} carried: {stay.outcome.cause}")
    return (job.logs / "rank-0000.out").read_text()
