"""Environment variables of the two halves, filtered from their user's environment.

A program has no MPI library inside: it gets all but what launchers set, and its rank in the variables that they would
set. A launcher and the lower halves have one: they get all but the way to libraries of another MPI, which a program may
need for what else stands there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_OF_LAUNCHERS: Final = (
    *("HYDI_", "HYDRA_", "I_MPI_", "OMPI_", "OPAL_", "PMIX_", "PMI_", "PRTE_"),
    *("MPI_LOCALNRANKS", "MPI_LOCALRANKID", "GFORTRAN_UNBUFFERED_PRECONNECTED"),
)
"""Prefixes of variables that Open MPI's, MPICH's and Intel's launchers set for a rank. A job that is started within
another one would pass them on, and a program that looks for them would take itself for a rank of that."""
_OF_PROGRAMS: Final = "MPI4PY_"
"""Prefix of what users set for the mpi4py of their program: which MPI it is for, whether and how it begins. The lower
half has an mpi4py of its own, which would obey."""
_TUNABLES: Final = "GLIBC_TUNABLES"
_NO_RSEQ: Final = "glibc.pthread.rseq=0"
"""Restartable sequences make the kernel write to a thread at each switch: 0.2 us of a small call, which is two of them.
glibc uses them to find its core, and the kernel shows that, too."""


def program_environment(environ: Mapping[str, str], *, first_on_path: str = "") -> dict[str, str]:
    """The environment without what launchers set; ``first_on_path`` leads its PYTHONPATH, if it is given.

    >>> program_environment({"HOME": "/h", "PMI_RANK": "3", "MPI4PY_RC_THREADS": "0"}, first_on_path="/s")
    {'HOME': '/h', 'MPI4PY_RC_THREADS': '0', 'PYTHONPATH': '/s'}
    """
    clean = {name: value for name, value in environ.items() if not name.startswith(_OF_LAUNCHERS)}
    if first_on_path:
        clean["PYTHONPATH"] = os.pathsep.join(filter(None, [first_on_path, clean.get("PYTHONPATH")]))
    return clean


def rank_variables(rank: int, num_ranks: int) -> dict[str, str]:
    """What programs and scripts look for in their environment, to know who they are without MPI.

    Only what no restart changes: where a rank runs, and how many run beside it, is left out.

    >>> rank_variables(1, 4)
    {'OMPI_COMM_WORLD_RANK': '1', 'OMPI_COMM_WORLD_SIZE': '4', 'PMI_RANK': '1', 'PMI_SIZE': '4'}
    """
    return {
        f"{launcher}_{what}": str(number)
        for launcher in ("OMPI_COMM_WORLD", "PMI")
        for what, number in (("RANK", rank), ("SIZE", num_ranks))
    }


def lower_environment(environ: Mapping[str, str], launcher: str) -> dict[str, str]:
    """The environment without folders of shared libraries that would stand in the way of the launcher's own MPI.

    Such a folder lies elsewhere and holds an MPI, or a part that this MPI brings along: a launcher with the PMIx of
    another may not even start. What is meant for the program's mpi4py goes, too.
    """
    own = Path(launcher).resolve().parents[1]
    parts = _libraries(own, "lib/lib*.so*", "lib/*mpi*/lib*.so*")
    folders = environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    kept = [folder for folder in folders if folder and (_is_in(folder, own) or not _stands_in_the_way(folder, parts))]
    found = {
        name: value
        for name, value in environ.items()
        if name != "LD_LIBRARY_PATH" and not name.startswith(_OF_PROGRAMS)
    }
    return {**found, "LD_LIBRARY_PATH": os.pathsep.join(kept)} if kept else found


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a lower half gets beside that, whatever its launcher passes on; what the user chose stays.

    >>> rank_environment({"GLIBC_TUNABLES": "glibc.malloc.check=3"})
    {'GLIBC_TUNABLES': 'glibc.pthread.rseq=0:glibc.malloc.check=3'}
    """
    # Of two for one the last is taken.
    return {_TUNABLES: ":".join(filter(None, [_NO_RSEQ, environ.get(_TUNABLES)]))}


def _stands_in_the_way(folder: str, parts: set[str]) -> bool:
    found = _libraries(Path(folder), "lib*.so*")
    return any(name.startswith("libmpi") for name in found) or not found.isdisjoint(parts)


def _libraries(place: Path, *patterns: str) -> set[str]:
    """Names of shared libraries without their versions."""
    return {path.name.partition(".so")[0] for pattern in patterns for path in place.glob(pattern)}


def _is_in(folder: str, place: Path) -> bool:
    return Path(folder).resolve().is_relative_to(place)
