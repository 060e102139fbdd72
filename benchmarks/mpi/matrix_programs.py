"""Programs of the matrix: some of each language, long enough for as many restarts as a job has.

Those in C and Fortran check each value that they get, and are linked with an MPI's own library, as their makers would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mpi.c_programs import library_folder
from benchmarks.mpi.chain import carried_python, native_answer, native_python
from remesh.carried.mpi.mpis import find_mpi
from tests.mpi.fortran import compiled_fortran, variables, variables_without_mpi
from tests.mpi.test_library import compiled

_PYTHON = {
    "ring": (1200, 0.01),
    "jacobi": (600, 0.01),
    "cg": (500, 0.01),
    "fft": (500, 0.01),
    "master": (1600, 0.01),
    "windows": (110, 0.01),
    "files": (80, 0.01),
}
"""Steps and pauses, as the programs take them: here in s."""
_C = {"collectives": (40, 250_000), "ring": (1200, 0.01)}
_FACES = ("mpich", "openmpi")
"""MPIs with which programs in C are linked."""
_FORTRAN = ("every_kind", 600, 20_000)
_MODULES: dict[str, tuple[str, ...]] = {"mpif.h": (), "mpi": ("-DMODULE",)}
"""Fortran's ways to MPI, with the options of the compiler."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program, and how it is started."""

    name: str
    argv: tuple[str, ...]
    """With a pause, the last argument, so that it is found at its work."""
    environment: Mapping[str, str]
    natively: tuple[tuple[str, ...], Mapping[str, str]]
    """The same steps without pauses, on a real MPI."""

    def native_answer(self) -> str:
        """What it answers without us, uninterrupted."""
        return native_answer(*self.natively)


def make_programs(folder: Path) -> dict[str, list[Program]]:
    """The programs of each language, compiled in a folder."""
    return {"Python": list(map(_in_python, _PYTHON)), "C": _in_c(folder), "Fortran": _in_fortran(folder)}


def _in_python(name: str) -> Program:
    steps, pause_s = _PYTHON[name]
    return Program(name, *carried_python(name, steps, pause_s), native_python(name, steps))


def _in_c(folder: Path) -> list[Program]:
    found = []
    for name, (steps, pause) in _C.items():
        by_face = {face: (str(compiled(name, face, folder)), str(steps)) for face in _FACES}
        natively = ((*by_face["mpich"], "0"), {"LD_LIBRARY_PATH": str(library_folder(find_mpi("mpich")))})
        for face, argv in by_face.items():
            found.append(Program(f"{name} ({face})", (*argv, str(pause)), {"PATH": "/usr/bin:/bin"}, natively))
    return found


def _in_fortran(folder: Path) -> list[Program]:
    name, steps, pause_us = _FORTRAN
    environment, found = variables_without_mpi(folder / "libraries"), []
    for module, options in _MODULES.items():
        into = folder / module
        into.mkdir()
        argv = (str(compiled_fortran(f"{name}.F90", "mpich", into, *options)), str(steps))
        with_mpi = {"LD_LIBRARY_PATH": variables()["LD_LIBRARY_PATH"]}
        found.append(Program(f"{name} ({module})", (*argv, str(pause_us)), environment, ((*argv, "0"), with_mpi)))
    return found
