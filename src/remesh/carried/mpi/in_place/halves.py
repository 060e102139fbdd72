"""Build of the halves: what a program is linked with, and the lower half of each face.

The lower half is compiled against the header of the face that ``library/generate.py`` makes, and linked with our own
library, which has the real one's name; so no MPI is needed to build it, and the real one is found when it is loaded.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from remesh.carried.mpi.library.build import BUILT, HERE as LIBRARY, LIBRARIES

HERE: Final = Path(__file__).parent
UPPER: Final = ("load.c", "region.c", "sites.c", "places.c", "signals.c", "seat_line.c", "cross.S", "serve.S")
"""Sources of the upper half's part, for a program or for a library of it."""
LOWER: Final = ("lower_half.c", "cross.S")
"""Sources that every lower half is made of, besides what it offers."""
_OPTIONS: Final = ("-O2", "-g1", "-std=gnu11", "-Wall", "-Wextra", "-Werror=implicit", "-pthread", "-I", str(HERE))


def build_upper(target: Path, *sources: Path) -> Path:
    """Build a program that has the upper half's part in it."""
    return compile_program(target, "-fPIE", "-pie", *sources, *(HERE / name for name in UPPER))


def build_lower(target: Path, *sources: str | Path) -> Path:
    """Build a lower half; ``sources`` have the function lower_functions(), and options of the compiler."""
    return compile_program(target, "-pie", "-fPIE", *sources, *(HERE / name for name in LOWER))


def build_lower_mpi(face: str, target: Path) -> Path:
    """Build the lower half for MPIs of a face: ``mpich``, ``openmpi`` or ``abi``."""
    with tempfile.TemporaryDirectory() as folder:
        _run([sys.executable, str(LIBRARY / "generate.py"), face, folder])
        return build_lower(target, "-fPIC", "-I", folder, "-I", LIBRARY, HERE / "lower_mpi.c", BUILT / LIBRARIES[face])


def build_seat(target: Path) -> Path:
    """Build the program that mpiexec starts for each rank."""
    return compile_program(target, HERE / "seat.c", HERE / "seat_line.c")


def compile_program(target: Path, *arguments: str | Path) -> Path:
    """Compile and link; RuntimeError with the compiler's words if that fails."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    _run([*compiler, *_OPTIONS, *map(str, arguments), "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr}")
