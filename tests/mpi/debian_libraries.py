"""Programs of ours on parallel libraries that others wrote, as Debian has built them for Open MPI or MPICH.

What a library asks of MPI is its makers' choice: files of several ranks (HDF5, PnetCDF), windows (OpenCoarrays, PETSc),
memory that ranks share (p4est), neighbours (PETSc), objects of C++ (Boost). Each program goes round a loop, and rank 0
prints one line, `answer`.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.mpi.conftest import PROGRAMS
from tests.mpi.debian import ROOT, libraries
from tests.mpi.debian_programs import Program, printed, variables

_SOURCES: Final = PROGRAMS / "on_libraries"
_PYTHON: Final = "/usr/bin/python3"
"""Debian's, for which its packages are compiled."""
_COMPILERS: Final = {".c": ("gcc",), ".cpp": ("g++", "-DNDEBUG", "-w"), ".f90": ("gfortran", "-fcoarray=lib")}
_HEADERS: Final = ("lib/x86_64-linux-gnu/openmpi/include", "include", "include/x86_64-linux-gnu")
_ANSWER: Final = printed(r"^answer .*$")


def _compiled(name: str, steps: int, *libraries_of_it: str) -> Callable[[Path], list[str]]:
    """Compile a program beside the folders of its runs, with the libraries that it uses, the MPI last."""

    def prepare(folder: Path) -> list[str]:
        source = _SOURCES / name
        compiler, *options = _COMPILERS[source.suffix]
        missing = [one for one in libraries_of_it if not list(ROOT.glob(f"usr/lib/x86_64-linux-gnu/**/{one}"))]
        if shutil.which(compiler) is None or missing:
            pytest.skip(f"needs {compiler} and Debian's {missing or libraries_of_it}, of `make mpi-programs`")
        program = folder.parent / source.stem
        if program.exists():
            return [str(program), str(steps)]
        options += ["-O1", "-Wl,--allow-shlib-undefined", *(f"-I{ROOT / 'usr' / header}" for header in _HEADERS)]
        folders = [f"-L{found}" for found in (*libraries(), ROOT / "usr/lib/x86_64-linux-gnu/openmpi/lib")]
        linked = [*folders, *(f"-l:{library}" for library in libraries_of_it)]
        subprocess.run([compiler, *options, str(source), "-o", str(program), *linked], check=True, env=variables())
        return [str(program), str(steps)]

    return prepare


def _interpreted(name: str, steps: int, package: str) -> Callable[[Path], list[str]]:
    """A program in Python, on a package of Debian's."""

    def prepare(folder: Path) -> list[str]:
        found = subprocess.run(
            [_PYTHON, "-c", f"import importlib.util, numpy; assert importlib.util.find_spec({package!r})"],
            env=variables(),
            capture_output=True,
            check=False,
        )
        if found.returncode:
            pytest.skip(f"needs Debian's Python and its package {package}, of `make mpi-programs`")
        return [_PYTHON, str(_SOURCES / name), str(steps)]

    return prepare


_OPEN: Final = "libmpi.so.40"
_FFTW: Final = ("libfftw3_mpi.so.3", "libfftw3.so.3", _OPEN)
_BOOST: Final = ("libboost_mpi.so.1.74.0", "libboost_serialization.so.1.74.0", "libmpi_cxx.so.40", _OPEN)
_FOREST: Final = ("libp4est-2.2.so", "libsc-2.2.so", _OPEN)

PROGRAMS_ON_LIBRARIES: Final = (
    Program("HDF5", _interpreted("fields.py", 40, "h5py"), _ANSWER, 2.0, is_ours=True),
    Program("PETSc", _interpreted("solvers.py", 150, "slepc4py"), _ANSWER, 1.0, is_ours=True),
    Program("FFTW", _compiled("waves.c", 600, *_FFTW), _ANSWER, 0.5, is_ours=True),
    Program("PnetCDF", _compiled("records.c", 250, "libpnetcdf.so.0d", _OPEN), _ANSWER, 1.0, is_ours=True),
    Program("p4est", _compiled("forest.c", 120, *_FOREST), _ANSWER, 1.0, is_ours=True, num_ranks=3),
    Program("Boost", _compiled("maps.cpp", 1500, *_BOOST), _ANSWER, 0.6, is_ours=True),
    Program(
        "coarrays", _compiled("images.f90", 120, "libcaf_openmpi.so.3", _OPEN), _ANSWER, 0.6, is_ours=True, num_ranks=3
    ),
)
