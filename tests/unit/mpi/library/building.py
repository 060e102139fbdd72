"""Programs of C against the library alone, in one process without a lower half; and against an MPI of others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from remesh.errors import ConfigError
from remesh.mpi.library.build import HERE as LIBRARY
from remesh.mpi.mpis import find_mpi

HERE: Final = Path(__file__).parent
_NO_CHANNEL: Final = ("channel.c", "slots.c")
"""Files that ``lone.c`` and ``loopback.c`` stand for."""
_CC: Final = ("cc", "-O1", "-g1", "-std=gnu11", "-Wall", "-Wextra", "-Werror")
_CHECKED: Final = ("-fsanitize=address,undefined", "-fno-sanitize-recover")
_LIBRARIES: Final = ("-pthread", "-lm", "-ldl")
_NAMES: Final = {
    "mpich": ("libmpi.so.12", "libmpich.so.12"),
    "openmpi": ("libmpi.so.40", "libmpi_mpifh.so.40"),
    "abi": ("libmpi_abi.so.1",),
}


def has_compiler() -> bool:
    """Whether C can be compiled here."""
    return shutil.which("cc") is not None


def build_lone(face: str, program: Path, folder: Path, *more: Path, lower: str = "lone.c") -> Path:
    """The program with the library of a face, with every access to memory checked.

    ``more``: further sources of it; ``lower``: the file that stands for the lower half.
    """
    made = folder / face
    _run([sys.executable, str(LIBRARY / "generate.py"), face, str(made)])
    library = [path for path in sorted(LIBRARY.glob("*.c")) if path.name not in _NO_CHANNEL]
    sources = [*library, *sorted(made.glob("*.c")), HERE / lower, program, *more]
    target = made / program.stem
    _run([*_CC, *_CHECKED, "-I", str(made), "-I", str(LIBRARY), *map(str, sources), "-o", str(target), *_LIBRARIES])
    return target


def build_shared(face: str, folder: Path, lower: str) -> Path:
    """The library of a face by the names under which programs look for it; the folder."""
    made = folder / face
    _run([sys.executable, str(LIBRARY / "generate.py"), face, str(made)])
    library = [path for path in sorted(LIBRARY.glob("*.c")) if path.name not in _NO_CHANNEL]
    sources = [*library, *sorted(made.glob("*.c")), HERE / lower]
    first, *others = _NAMES[face]
    options = ("-fPIC", "-shared", f"-Wl,-soname,{first}", "-I", str(made), "-I", str(LIBRARY))
    _run([*_CC, *options, *map(str, sources), "-o", str(made / first), *_LIBRARIES])
    for name in others:
        (made / name).symlink_to(first)
    return made


def build_native(mpi: str, program: Path, folder: Path) -> Path | None:
    """The program with an MPI of others; None where there is none with its headers."""
    try:
        home = Path(find_mpi(mpi).launcher).parents[1]
    except ConfigError:
        return None
    if not (home / "include" / "mpi.h").exists():
        return None
    target = folder / f"{program.stem}_{mpi}"
    places = ["-I", str(home / "include"), "-L", str(home / "lib"), f"-Wl,-rpath,{home / 'lib'}"]
    _run(["cc", "-w", *places, str(program), "-o", str(target), "-lmpi"])
    return target


def output(program: Path, lines: list[str], *arguments: str, **variables: str) -> list[str]:
    """What a program prints for these lines of input; it must end well, and say nothing on stderr."""
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **variables}
    text = "".join(f"{line}\n" for line in lines)
    command = [str(program), *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=environ, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[:4000]
    return done.stdout.splitlines()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
