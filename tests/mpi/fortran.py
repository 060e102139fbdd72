"""Compilation of our programs in Fortran, against Debian's MPIs, which have Fortran (`make mpi-programs`)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mpi.debian import ROOT, libraries

PROGRAMS = Path(__file__).parent / "programs" / "fortran"
DEBIAN = ROOT / "usr/lib/x86_64-linux-gnu"
_HEADERS = {
    "mpich": (ROOT / "usr/include/x86_64-linux-gnu/mpich",),
    "openmpi": (DEBIAN / "openmpi/include", DEBIAN / "fortran/gfortran-mod-15/openmpi"),
}
_LIBRARIES = {
    "mpich": ("libmpichfort.so.12", "libmpich.so.12"),
    "openmpi": ("libmpi_usempif08.so.40", "libmpi_usempi_ignore_tkr.so.40", "libmpi_mpifh.so.40", "libmpi.so.40"),
}
"""Those of the MPI that the program was compiled against, as it was linked with them."""


def compiler() -> list[str]:
    """The machine's compiler, or Debian's as it was fetched; skips where there is none."""
    fetched = ROOT / "usr/bin/gfortran-12"
    if shutil.which("gfortran"):
        return ["gfortran"]
    if fetched.exists():
        folder = ROOT / "usr/lib/gcc/x86_64-linux-gnu/12"
        return [str(fetched), f"-B{folder}/", f"-B{_folder_of_gcc()}/", f"-L{folder}"]
    pytest.skip("no gfortran: install it, or fetch Debian's with `make mpi-programs`")


def _folder_of_gcc() -> Path:
    """Where the machine's C compiler has what every program is linked with."""
    asked = subprocess.run(["gcc-12", "-print-file-name=crtbeginS.o"], capture_output=True, text=True, check=True)
    return Path(asked.stdout.strip()).parent


def need_headers(face: str) -> None:
    """Skips where an MPI's Fortran has not been fetched."""
    if not (_HEADERS[face][0] / "mpif.h").exists():
        pytest.skip(f"no mpif.h of {face}: fetch Debian's with `make mpi-programs`")


def compiled_fortran(source: str, face: str, into: Path, *options: str) -> Path:
    """A program of ours, as its maker would have linked it with an MPI."""
    need_headers(face)
    program = into / f"{Path(source).stem}-{face}"
    includes = [text for folder in _HEADERS[face] for text in ("-I", str(folder))]
    names = [f"-l:{name}" for name in _LIBRARIES[face]]
    folders = [f"-L{folder}" for folder in libraries()]
    fixed = ("-w", "-fallow-argument-mismatch", "-Wl,--allow-shlib-undefined", "-Wl,--no-as-needed", "-J", str(into))
    command = [*compiler(), *fixed, *options, *includes, str(PROGRAMS / source), "-o", str(program), *folders, *names]
    subprocess.run(command, check=True, env=variables())
    return program


def variables_without_mpi(into: Path) -> dict[str, str]:
    """The same without any library of an MPI: a folder of links to all others."""
    into.mkdir()
    for folder in map(Path, libraries()):
        for path in folder.glob("*.so.*"):
            link = into / path.name
            if not path.name.startswith("libmpi") and not link.exists():
                link.symlink_to(path)
    return {**variables(), "LD_LIBRARY_PATH": str(into)}


def variables() -> dict[str, str]:
    """The environment in which such a program finds what it was linked with."""
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(libraries()), "GFORTRAN_UNBUFFERED_ALL": "1"}
