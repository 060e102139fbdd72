"""Library search of MPI programs: environment variables by which a program loads our library instead of its MPI.

The three faces have different file names, so one folder that stands first on LD_LIBRARY_PATH serves programs of all,
and those that a script starts. Only a program whose search path is built in (DT_RPATH) would look elsewhere first: it
gets its face by LD_PRELOAD. mpi4py's wheels choose among several builds, by a variable that is set here. A program in
Fortran that was linked with MPICH brings MPICH's own library for Fortran; one that does not find it gets ours.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from remesh.carried.mpi.library.build import ARENA, BUILT, FORTRAN, FORTRAN_FOLDER, LIBRARIES, OTHER_NAMES
from remesh.foundation.errors import ConfigError
from remesh.foundation.settings import SHARED_ARRAYS

_LOAD, _DYNAMIC, _INTERPRETER = 1, 2, 3
_NEEDED, _STRING_TABLE, _RPATH, _RUNPATH = 1, 5, 15, 29
_MOST_BYTES: Final = 1 << 20
"""Limit for a dynamic section or a table of strings; a longer one is not a program's."""
_NAMES: Final = (*LIBRARIES.values(), *OTHER_NAMES)
_LOADER: Final = "/lib64/ld-linux-x86-64.so.2"


@dataclass(frozen=True, slots=True)
class Linkage:
    """The libraries that a program asks for, and where it looks for them."""

    is_static: bool
    needed: tuple[str, ...] = ()
    rpath: str = ""
    """Searched before LD_LIBRARY_PATH."""


def read_linkage(program: Path) -> Linkage | None:
    """Read how a program was linked; None if it is no 64-bit ELF file (as a script). OSError if it cannot be read."""
    with program.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
            return None
        try:
            return _read_elf(file, head)
        except (struct.error, ValueError, UnicodeDecodeError):
            return None


def _read_elf(file: BinaryIO, head: bytes) -> Linkage:
    table_offset, row_bytes, num_rows = *struct.unpack_from("<Q", head, 32), *struct.unpack_from("<HH", head, 54)
    file.seek(table_offset)
    rows = [struct.unpack_from("<IIQQQQ", file.read(row_bytes)) for _ in range(num_rows)]
    loads = [(address, offset, size) for kind, _, offset, address, _, size in rows if kind == _LOAD]
    dynamic = next(((offset, size) for kind, _, offset, _, _, size in rows if kind == _DYNAMIC), None)
    if dynamic is None:
        return Linkage(is_static=True)
    file.seek(dynamic[0])
    data = file.read(min(dynamic[1], _MOST_BYTES))
    entries = [struct.unpack_from("<QQ", data, at) for at in range(0, len(data) - 15, 16)]
    where = next(value for tag, value in entries if tag == _STRING_TABLE)
    file.seek(next(offset + where - address for address, offset, size in loads if address <= where < address + size))
    strings = file.read(_MOST_BYTES)

    def text(at: int) -> str:
        return strings[at : strings.index(b"\0", at)].decode()

    runpath = any(tag == _RUNPATH for tag, _ in entries)
    rpath = "" if runpath else ":".join(text(value) for tag, value in entries if tag == _RPATH)
    is_static = not any(kind == _INTERPRETER for kind, *_ in rows) and not any(tag == _NEEDED for tag, _ in entries)
    return Linkage(is_static, tuple(text(value) for tag, value in entries if tag == _NEEDED), rpath)


def find_missing_library() -> str | None:
    """Describe what is missing if the library was not built, and how to get it; None if it is there."""
    if all((BUILT / name).exists() for name in (*_NAMES, ARENA)):
        return None
    return (
        "the library for MPI programs was not built; install a C compiler (cc) and then Remesh again, or run "
        "`python hatch_build.py` in a checkout"
    )


def check_program(program: Path) -> None:
    """Raise ConfigError if a program cannot find the library, whatever its environment is."""
    try:
        linkage = read_linkage(program)
    except OSError as error:
        raise ConfigError(f"reading {program}: {error.strerror}; name a program that can be read") from error
    if linkage is not None and linkage.is_static:
        raise ConfigError(
            f"starting {program}: it is linked statically, so its MPI cannot be replaced; link it with a shared "
            "libmpi, as mpicc does by itself"
        )
    missing = find_missing_library()
    if missing is not None:
        raise ConfigError(f"starting {program}: {missing}")


def lacks_fortran(program: Path, linkage: Linkage, environment: Mapping[str, str]) -> bool:
    """Whether a program, or a library of it, wants MPICH's library for Fortran and would not find it."""
    if not any(name in (*_NAMES, *FORTRAN) for name in linkage.needed):
        return False
    # The loader then lists what it finds, and starts nothing.
    asked = {**environment, "LD_TRACE_LOADED_OBJECTS": "1"}
    done = subprocess.run([_LOADER, str(program)], env=asked, capture_output=True, text=True, check=False)
    return any(
        line.split()[:1] == [name] and "not found" in line for line in done.stdout.splitlines() for name in FORTRAN
    )


def library_environment(program: Path | None, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a program finds the library; ``program`` is None if it is not known."""
    found = dict(environment)
    found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(BUILT), environment.get("LD_LIBRARY_PATH", "")]))
    # Its user may have chosen one: that of another library in the program, which was built with it.
    chosen = environment.get("MPI4PY_MPIABI", "")
    face = chosen if chosen in LIBRARIES else "mpich"
    found["MPI4PY_MPIABI"], found["MPI4PY_LIBMPI"] = face, str(BUILT / LIBRARIES[face])
    linkage = None if program is None else read_linkage(program)
    if linkage is not None and program is not None and lacks_fortran(program, linkage, found):
        found["LD_LIBRARY_PATH"] += f"{os.pathsep}{BUILT / FORTRAN_FOLDER}"
    first = [] if linkage is None or not linkage.rpath else [name for name in linkage.needed if name in _NAMES][:1]
    first += [ARENA] if SHARED_ARRAYS.is_on(environment) else []
    if first:
        found["LD_PRELOAD"] = " ".join([*(str(BUILT / name) for name in first), environment.get("LD_PRELOAD", "")])
    return found
