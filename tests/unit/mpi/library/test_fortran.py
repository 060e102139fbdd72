"""Programs of Fortran on the Fortran library of the MPI that they were compiled against, over the library alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mpi.debian import ROOT, libraries
from tests.unit.mpi.library.building import build_shared, has_compiler

pytestmark = pytest.mark.procs

_PROGRAMS = Path(__file__).parents[3] / "mpi" / "programs" / "fortran"
_DEBIAN = ROOT / "usr/lib/x86_64-linux-gnu"
_HEADERS = {
    "mpich": (ROOT / "usr/include/x86_64-linux-gnu/mpich",),
    "openmpi": (_DEBIAN / "openmpi/include", _DEBIAN / "fortran/gfortran-mod-15/openmpi"),
}
_LIBRARIES = {
    "mpich": ("libmpichfort.so.12", "libmpich.so.12"),
    "openmpi": ("libmpi_usempif08.so.40", "libmpi_usempi_ignore_tkr.so.40", "libmpi_mpifh.so.40", "libmpi.so.40"),
}
"""Those of the MPI that the program was compiled against, as it was linked with them."""


def _compiler() -> list[str]:
    """The machine's compiler, or Debian's as it was fetched."""
    fetched = ROOT / "usr/bin/gfortran-12"
    if shutil.which("gfortran"):
        return ["gfortran"]
    if fetched.exists():
        folder = ROOT / "usr/lib/gcc/x86_64-linux-gnu/12"
        return [str(fetched), f"-B{folder}/", f"-L{folder}"]
    pytest.skip("no gfortran: install it, or fetch Debian's with `make mpi-programs`")


@pytest.fixture(scope="session", params=["mpich", "openmpi"])
def face(request: pytest.FixtureRequest) -> str:
    """One that has Fortran, with what is needed to compile for it."""
    name: str = request.param
    if not has_compiler() or not (_HEADERS[name][0] / "mpif.h").exists():
        pytest.skip(f"no C compiler (cc) on PATH, or no mpif.h of {name}: fetch Debian's with `make mpi-programs`")
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
    environ = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(libraries()), "GFORTRAN_UNBUFFERED_ALL": "1"}
    program = tmp_path / "program"
    includes = [text for folder in _HEADERS[face] for text in ("-I", str(folder))]
    names = [f"-l:{name}" for name in _LIBRARIES[face]]
    folders = [f"-L{folder}" for folder in libraries()]
    fixed = ("-w", "-fallow-argument-mismatch", "-Wl,--allow-shlib-undefined", "-Wl,--no-as-needed")
    command = [*_compiler(), *fixed, *options, *includes, str(_PROGRAMS / source), "-o", str(program), *folders, *names]
    subprocess.run(command, check=True, env=environ)
    environ["LD_LIBRARY_PATH"] = os.pathsep.join([str(library), *libraries()])
    done = subprocess.run([str(program), "3"], capture_output=True, text=True, env=environ, check=False)
    assert (done.stdout.strip(), done.stderr) == (answer, "")
