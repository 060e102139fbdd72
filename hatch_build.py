"""Builds the C extension of `remesh.mpi` beside its source, if a C compiler is there; goes on without if not.

``python hatch_build.py`` does the same for a checkout. Without the extension all of Remesh works but MPI programs;
``remesh mpi`` says so then. ``CC`` names the compiler, with its arguments; ``REMESH_PURE=1`` makes a wheel without any.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object

_FOLDER = Path(__file__).resolve().parent / "src" / "remesh" / "mpi"
_EXTENSION = _FOLDER / "_fast.abi3.so"


def build_extension() -> Path | None:
    """The built extension, or None with a line on stderr that says why there is none."""
    compiler, *arguments = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler) is None:
        print("building _fast: no C compiler on PATH (CC or cc); going on without", file=sys.stderr)  # noqa: T201
        return None
    unfinished = _EXTENSION.with_suffix(f".{os.getpid()}")
    flags = ["-O2", "-Wall", "-fPIC", "-fvisibility=hidden", "-shared", "-I", sysconfig.get_path("include")]
    sources = sorted(map(str, _FOLDER.glob("_*.c")))
    command = [compiler, *arguments, *flags, *sources, "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"building _fast: {compiler} failed; going on without\n{done.stderr}", file=sys.stderr)  # noqa: T201
        return None
    unfinished.replace(_EXTENSION)
    return _EXTENSION


class BuildHook(BuildHookInterface):
    """Adds the extension to a wheel, which then fits this machine's platform and every Python from 3.11 on."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        extension = None if os.environ.get("REMESH_PURE") else build_extension()
        if extension is not None and version != "editable":
            build_data["force_include"][str(extension)] = f"remesh/mpi/{extension.name}"
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp311-abi3-{platform}"


if __name__ == "__main__":
    sys.exit(build_extension() is None)
