"""Build of the MPI library: once for each face, into ``built/``, where programs look for their libraries first.

The three faces have other file names, so a program finds the one that it was linked with. Some packagers have names of
their own for MPICH's, and Open MPI's has one more for Fortran; those are empty libraries that lead to it. MPICH's entry
points for Fortran are a library apart, in a folder that only programs search that lack MPICH's own.

To compile all of it takes a minute: where sources, options and compiler are those of what stands there, it stays.

``python -m remesh.carried.mpi.library.build`` builds for a checkout; ``hatch_build.py`` does when Remesh is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
BUILT: Final = HERE / "built"
LIBRARIES: Final = {"mpich": "libmpi.so.12", "openmpi": "libmpi.so.40", "abi": "libmpi_abi.so.1"}
"""Face to the name of its library."""
OTHER_NAMES: Final = {
    **dict.fromkeys(("libmpich.so.12", "libmpi_cray.so.12", "libmpi_gnu_123.so.12"), "mpich"),
    "libmpi_mpifh.so.40": "openmpi",
}
"""The names of MPICH's library at Debian and Cray, and of Open MPI's for Fortran, each with its face."""
FORTRAN: Final = ("libmpifort.so.12", "libmpichfort.so.12")
"""MPICH's library for Fortran, and Debian's name for it."""
FORTRAN_FOLDER: Final = "fortran"
ARENA: Final = "libremesh_arena.so"
"""A library in place of malloc for large blocks that are to be in memory that both halves share."""
ALL: Final = (*LIBRARIES.values(), *OTHER_NAMES, *(f"{FORTRAN_FOLDER}/{name}" for name in FORTRAN), ARENA)
"""Every file that is made, by its path in ``built/``."""
_DIGEST: Final = "digest"
"""The file in ``built/`` that lists of what the libraries beside it were made. It is written last."""
_OPTIONS: Final = ("-O2", "-g1", "-std=gnu11", "-Wall", "-Wextra", "-Werror=implicit", "-fPIC", "-shared", "-pthread")


def build(into: Path = BUILT) -> list[Path]:
    """Build all faces, unless they stand there already, and return the libraries.

    RuntimeError with the compiler's words if one cannot be built.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        raise RuntimeError("no C compiler on PATH (CC or cc)")
    made, digest, told = [into / name for name in ALL], _digest(compiler), into / _DIGEST
    if told.exists() and told.read_text() == digest and all(path.exists() for path in made):
        return made
    told.unlink(missing_ok=True)
    _build_all(compiler, into)
    told.write_text(digest)
    return made


def _digest(compiler: list[str]) -> str:
    """Of the compiler, and of all that a library may be made of."""
    version = _run([*compiler, "--version"])
    digest = hashlib.sha256("\0".join([*compiler, version]).encode())
    room = HERE.parent
    sources = {*room.rglob("*.[ch]"), *HERE.rglob("*.py"), *HERE.glob("tables/*"), *room.glob("calls/*.py")}
    for path in sorted(path for path in sources if BUILT not in path.parents):
        digest.update(f"\0{path.relative_to(room)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _build_all(compiler: list[str], into: Path) -> None:
    into.mkdir(exist_ok=True)
    faces = {face: _build_face(compiler, face, into / library) for face, library in LIBRARIES.items()}
    for name, face in OTHER_NAMES.items():
        # An empty source: some compilers do not link without any.
        link = ("-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", "-x", "c", os.devnull, "-x", "none", str(faces[face]))
        _link([*compiler, "-shared", f"-Wl,-soname,{name}"], link, into / name)
    build_fortran(compiler, faces["mpich"], into / FORTRAN_FOLDER)
    arena = [*compiler, *_OPTIONS, "-fno-builtin", str(HERE / "arena" / "arena.c")]
    _link(arena, ("-ldl",), into / ARENA)


def _build_face(compiler: list[str], face: str, target: Path) -> Path:
    with _sources_in(target.parent) as folder:
        _run([sys.executable, str(HERE / "generate.py"), face, folder])
        sources = [str(path) for path in sorted([*HERE.glob("*.c"), *Path(folder).glob("*.c")])]
        command = [*compiler, *_OPTIONS, "-I", folder, "-I", str(HERE), f"-Wl,-soname,{target.name}", *sources]
        return _link(command, ("-lm", "-ldl"), target)


def build_fortran(compiler: list[str], mpich: Path, into: Path) -> None:
    """Build MPICH's libraries for Fortran, on that for C."""
    into.mkdir(exist_ok=True)
    with _sources_in(into) as folder:
        _run([sys.executable, str(HERE / "generate.py"), "mpich", folder])
        sources = [str(path) for place in (HERE, Path(folder)) for path in sorted((place / "mpifort").glob("*.c"))]
        places = ["-I", folder, "-I", str(HERE / "mpifort"), "-I", str(HERE)]
        for name in FORTRAN:
            command = [*compiler, *_OPTIONS, *places, f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN/..", *sources]
            _link(command, (str(mpich),), into / name)


@contextlib.contextmanager
def _sources_in(into: Path) -> Iterator[str]:
    """A folder for generated sources, which goes when they are compiled."""
    folder = into / f"sources.{os.getpid()}"
    folder.mkdir()
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder)


def _link(command: list[str], libraries: tuple[str, ...], target: Path) -> Path:
    """Link a library and put it in place; a process that has the old one mapped goes on with it."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    _run([*command, *libraries, "-o", str(unfinished)])
    unfinished.replace(target)
    return target


def _run(command: list[str]) -> str:
    """What a command prints. RuntimeError with its other output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    build()
