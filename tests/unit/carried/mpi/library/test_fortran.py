"""Programs of Fortran on the Fortran library of the MPI that they were compiled against, or on ours, over the library
alone."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from remesh.carried.mpi.library.build import build_fortran
from remesh.carried.mpi.library.facts import TABLES
from tests.mpi.debian import libraries
from tests.mpi.fortran import DEBIAN, compiled_fortran, need_headers, variables, variables_without_mpi
from tests.unit.carried.mpi.library.building import build_shared, has_compiler

pytestmark = [pytest.mark.procs, pytest.mark.slow]


@pytest.fixture(scope="session", params=["mpich", "openmpi"])
def face(request: pytest.FixtureRequest) -> str:
    """One that has Fortran, with what is needed to compile for it."""
    name: str = request.param
    if not has_compiler():
        pytest.skip("no C compiler (cc) on PATH")
    need_headers(name)
    return name


@pytest.fixture(scope="session")
def library(face: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the library of the face."""
    return build_shared(face, tmp_path_factory.mktemp("fortran"), "loopback.c")


@pytest.fixture(scope="session")
def fortran_of_ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with our Fortran library for MPICH's face, below that of the library."""
    if not has_compiler():
        pytest.skip("no C compiler (cc) on PATH")
    need_headers("mpich")
    library = build_shared("mpich", tmp_path_factory.mktemp("fortran of ours"), "loopback.c")
    build_fortran(["cc"], library / "libmpi.so.12", library / "fortran")
    return library / "fortran"


_CASES = [
    ("every_kind.F90", (), "answer 69"),
    ("every_kind.F90", ("-DMODULE",), "answer 69"),
    ("module_f08.f90", (), "answer 9"),
]


@pytest.mark.parametrize(("source", "options", "answer"), _CASES)
def test_every_kind_of_argument_means_in_fortran_what_mpi_says(
    face: str, library: Path, source: str, options: tuple[str, ...], answer: str, tmp_path: Path
) -> None:
    program = compiled_fortran(source, face, tmp_path, *options)
    assert _said([program, "3"], [str(library), *libraries()]) == answer


@pytest.mark.parametrize(("source", "options", "answer"), _CASES)
def test_the_same_without_a_library_of_mpich(
    fortran_of_ours: Path, source: str, options: tuple[str, ...], answer: str, tmp_path: Path
) -> None:
    program = compiled_fortran(source, "mpich", tmp_path, *options)
    others = variables_without_mpi(tmp_path / "others")["LD_LIBRARY_PATH"]
    assert _said([program, "3"], [str(fortran_of_ours.parent), str(fortran_of_ours), others]) == answer


def test_predefined_handles_have_the_numbers_of_open_mpi() -> None:
    """All that its mpif.h names, but types that its C has not."""
    need_headers("openmpi")
    header = (DEBIAN / "openmpi/include/mpif-handles.h").read_text()
    theirs = dict(re.findall(r"parameter \((\w+)=(\d+)\)", header))
    ours = dict(line.split() for line in (TABLES / "openmpi_fortran.txt").read_text().splitlines())
    assert len(theirs) > 90
    assert {name: ours.get(name) for name in theirs} == theirs | {"MPI_INTEGER16": None, "MPI_REAL2": None}


def test_all_that_the_module_mpi_f08_leads_to_is_there(fortran_of_ours: Path) -> None:
    """Debian's MPICH has all names; those left out here are called by its module alone, or refused in C."""
    ours = _names(fortran_of_ours / "libmpichfort.so.12")
    of_modules = re.compile(r"p?mpi_\w+_f08(ts)?(_large)?_|MPIR_F08_\w+|__mpi_(f08_\w+|sizeofs)_MOD_mpi_\w+")
    inside = re.compile(r"\w+_MOD_mpi_\w+_(c2f|f2c|c_assign_f08|f08_assign_c)|\w+_compile_constants_\w+")
    refused = re.compile(
        r"p?mpi_(comm_spawn(_multiple)?|register_datarep|delete_error_\w+)_f08_|\w+_conversion_fn_null\w*"
    )
    theirs = {name for name in _names(DEBIAN / "libmpichfort.so.12") if of_modules.fullmatch(name)}
    assert len(theirs) > 700
    missing = {name for name in theirs - ours if not inside.fullmatch(name) and not refused.fullmatch(name)}
    assert missing == set()


def _said(command: list[str | Path], places: list[str]) -> str:
    """What a program prints that finds its libraries there; it must end well and say nothing else."""
    environ = variables() | {"LD_LIBRARY_PATH": os.pathsep.join(places)}
    where = Path(command[0]).parent
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=where, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def _names(library: Path) -> set[str]:
    """Of what it defines."""
    told = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in told.stdout.splitlines()}
