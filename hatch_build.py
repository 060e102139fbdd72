"""Builds what rooms have in C beside its source, if a C compiler is there; goes on if not.

``python hatch_build.py`` does the same for a checkout. Without it all of Remesh works but MPI programs, of which
``remesh mpi`` says so then, and small collectives of `remesh torch` take longer. ``CC`` names the compiler, with its
arguments; ``REMESH_PURE=1`` makes a wheel without any.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object

_FOLDER = Path(__file__).resolve().parent / "src" / "remesh" / "carried" / "mpi"
_EXTENSIONS = [_FOLDER / "_fast.abi3.so", _FOLDER.parent / "torch" / "_short.abi3.so"]
"""Each of all files in C whose names begin with `_` in its folder."""
_REAPER = _FOLDER.parent / "images" / "restore" / "built" / "remesh-init"


def build_extensions() -> list[Path]:
    """The built extensions, empty with a line on stderr that says why one could not be built."""
    built = [path for path in _EXTENSIONS if _build_extension(path)]
    return built if len(built) == len(_EXTENSIONS) else []


def _build_extension(wanted: Path) -> bool:
    name = wanted.name.partition(".")[0]
    compiler, *arguments = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler) is None:
        print(f"building {name}: no C compiler on PATH (CC or cc); going on without", file=sys.stderr)  # noqa: T201
        return False
    unfinished = wanted.with_suffix(f".{os.getpid()}")
    flags = ["-O2", "-Wall", "-Werror=implicit", "-fPIC", "-fvisibility=hidden", "-shared"]
    flags += ["-I", sysconfig.get_path("include")]
    sources = sorted(map(str, wanted.parent.glob("_*.c")))
    command = [compiler, *arguments, *flags, *sources, "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"building {name}: {compiler} failed; going on without\n{done.stderr}", file=sys.stderr)  # noqa: T201
        return False
    unfinished.replace(wanted)
    return True


def build_reaper() -> list[Path]:
    """The program that a small init becomes, empty with a line on stderr that says why there is none."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    _REAPER.parent.mkdir(exist_ok=True)
    unfinished = _REAPER.with_suffix(f".{os.getpid()}")
    source = _REAPER.parents[1] / "_reaper.c"
    command = [*compiler, "-O2", "-Wall", "-Wextra", str(source), "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"building remesh-init: {compiler[0]} failed; going on without\n{done.stderr}", file=sys.stderr)  # noqa: T201
        return []
    unfinished.replace(_REAPER)
    return [_REAPER]


def build_library() -> list[Path]:
    """The built libraries for MPI programs, empty with a line on stderr that says why there are none."""
    try:
        return list(_load(_FOLDER / "library" / "build.py").build())
    except RuntimeError as error:
        print(f"building the library for MPI programs: {error}; going on without", file=sys.stderr)  # noqa: T201
        return []


def _load(path: Path) -> ModuleType:
    """A module of the package by its file: the package cannot be imported before it is installed."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildHook(BuildHookInterface):
    """Adds what was built to a wheel, which then fits this machine's platform and every Python from 3.11 on."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        extensions = [] if os.environ.get("REMESH_PURE") else build_extensions()
        others = [*build_library(), *build_reaper()] if extensions else []
        if extensions and version != "editable":
            for built in (*extensions, *others):
                build_data["force_include"][str(built)] = str(built.relative_to(_FOLDER.parents[2]))
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp311-abi3-{platform}"


if __name__ == "__main__":
    sys.exit(not build_extensions() or not build_library() or not build_reaper())
