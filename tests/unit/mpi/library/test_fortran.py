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

_PROGRAM = Path(__file__).parents[3] / "mpi" / "programs" / "fortran" / "every_kind.F90"
_HEADERS = {
    "mpich": ROOT / "usr/include/x86_64-linux-gnu/mpich",
    "openmpi": ROOT / "usr/lib/x86_64-linux-gnu/openmpi/include",
}
_LIBRARIES = {"mpich": ("-lmpichfort", "-lmpich"), "openmpi": ("-lmpi_mpifh", "-lmpi")}


def _compiler() -> list[str]:
    """The machine's compiler, or Debian's as it was fetched."""
    fetched = ROOT / "usr/bin/gfortran-12"
    if shutil.which("gfortran"):
        return ["gfortran"]
    if fetched.exists():
        folder = ROOT / "usr/lib/gcc/x86_64-linux-gnu/12"
        return [str(fetched), f"-B{folder}/", f"-L{folder}"]
    pytest.skip("no gfortran: install it, or fetch Debian's with `make mpi-programs`")


@pytest.mark.parametrize("face", ["mpich"])
@pytest.mark.parametrize("option", ["-UMODULE", "-DMODULE"])
def test_every_kind_of_argument_means_in_fortran_what_mpi_says(face: str, option: str, tmp_path: Path) -> None:
    if not has_compiler() or not (_HEADERS[face] / "mpif.h").exists():
        pytest.skip(f"no C compiler (cc) on PATH, or no mpif.h of {face}: fetch Debian's with `make mpi-programs`")
    found = os.pathsep.join([str(build_shared(face, tmp_path, "loopback.c")), *libraries()])
    environ = {**os.environ, "LD_LIBRARY_PATH": found, "GFORTRAN_UNBUFFERED_ALL": "1"}
    program = tmp_path / "every_kind"
    options = ("-w", "-fallow-argument-mismatch", "-Wl,--allow-shlib-undefined", option, "-I", str(_HEADERS[face]))
    names = (*(f"-L{folder}" for folder in libraries()), *_LIBRARIES[face])
    command = [*_compiler(), *options, str(_PROGRAM), "-o", str(program), *names]
    subprocess.run(command, check=True, env=environ)
    done = subprocess.run([str(program), "3"], capture_output=True, text=True, env=environ, check=False)
    assert (done.stdout, done.stderr) == ("answer 69\n", "")
