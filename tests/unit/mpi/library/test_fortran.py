"""Programs of Fortran on the Fortran library of the MPI that they were compiled against, over the library alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.mpi.debian import libraries
from tests.mpi.fortran import compiled_fortran, need_headers, variables
from tests.unit.mpi.library.building import build_shared, has_compiler

pytestmark = pytest.mark.procs


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


@pytest.mark.parametrize(
    ("source", "options", "answer"),
    [
        ("every_kind.F90", (), "answer 69"),
        ("every_kind.F90", ("-DMODULE",), "answer 69"),
        ("module_f08.f90", (), "answer 9"),
    ],
)
def test_every_kind_of_argument_means_in_fortran_what_mpi_says(
    face: str, library: Path, source: str, options: tuple[str, ...], answer: str, tmp_path: Path
) -> None:
    program = compiled_fortran(source, face, tmp_path, *options)
    environ = variables() | {"LD_LIBRARY_PATH": os.pathsep.join([str(library), *libraries()])}
    done = subprocess.run([str(program), "3"], capture_output=True, text=True, env=environ, check=False)
    assert (done.stdout.strip(), done.stderr) == (answer, "")
