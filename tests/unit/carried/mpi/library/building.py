"""Programs of C against the library alone, in one process without a lower half; and against an MPI of others."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from remesh.carried.mpi.library.build import HERE as LIBRARY
from remesh.carried.mpi.mpis import find_mpi
from remesh.foundation.errors import ConfigError

HERE: Final = Path(__file__).parent
_NO_CHANNEL: Final = ("channel.c", "slots.c")
"""Files that ``lone.c`` and ``loopback.c`` stand for."""
_CC: Final = ("cc", "-g1", "-std=gnu11", "-Wall", "-Wextra", "-Werror")
_OPTIMIZED: Final = "-O1"
"""Some warnings need it; without it compiling takes half as long."""
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


@dataclass(frozen=True)
class CheckedLibrary:
    """The library of a face, compiled so that every access to memory is checked, without its channel."""

    face: str
    folder: Path
    """Its objects, and the headers for programs."""

    @classmethod
    def build(cls, face: str, shared: Path) -> CheckedLibrary:
        """Compile it in a folder of ``shared``, once for all processes that ask for it there."""
        made = cls(face, shared / face)
        with (shared / f"{face}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (made.folder / "done").exists():
                _run([sys.executable, str(LIBRARY / "generate.py"), face, str(made.folder)])
                library = [path for path in sorted(LIBRARY.glob("*.c")) if path.name not in _NO_CHANNEL]
                with ThreadPoolExecutor(os.cpu_count()) as compilers:  # whoever else is here waits for them
                    sources = [*library, *sorted(made.folder.glob("*.c"))]
                    list(compilers.map(lambda source: made._cc("-c", source, folder=made.folder), sources))
                (made.folder / "done").touch()
        return made

    def link(self, folder: Path, lower: str, program: Path, *more: Path) -> Path:
        """The program on it; ``lower``: the file that stands for the lower half; ``more``: more of its own."""
        target = folder / program.stem
        sources = [HERE / lower, program, *more]
        self._cc(*sources, *sorted(self.folder.glob("*.o")), "-o", target, *_LIBRARIES, folder=folder)
        return target

    def build_alone(self, folder: Path, program: Path) -> Path:
        """A program that includes the file of the library that it is about."""
        target = folder / program.stem
        self._cc(program, "-o", target, *_LIBRARIES, folder=folder)
        return target

    def _cc(self, *arguments: str | Path, folder: Path) -> None:
        optimized = () if self.face == "mpich" else (_OPTIMIZED,)
        _run([*_CC, *optimized, *_CHECKED, "-I", str(self.folder), "-I", str(LIBRARY), *map(str, arguments)], folder)


def build_shared(face: str, folder: Path, lower: str) -> Path:
    """The library of a face by the names under which programs look for it; the folder."""
    made = folder / face
    _run([sys.executable, str(LIBRARY / "generate.py"), face, str(made)])
    library = [path for path in sorted(LIBRARY.glob("*.c")) if path.name not in _NO_CHANNEL]
    sources = [*library, *sorted(made.glob("*.c")), HERE / lower]
    first, *others = _NAMES[face]
    options = ("-fPIC", "-shared", f"-Wl,-soname,{first}", "-I", str(made), "-I", str(LIBRARY))
    _run([*_CC, _OPTIMIZED, *options, *map(str, sources), "-o", str(made / first), *_LIBRARIES])
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


def _run(command: list[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[:4000]
