"""Check that the C extension of MPI programs is there; it is built at install time where there is a C compiler."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Final

NAME: Final = "remesh.carried.mpi._fast"


def find_missing() -> str | None:
    """Describe what is missing if this Python cannot load the extension, and how to get it; None if it can."""
    try:
        importlib.import_module(NAME)
    except ImportError as error:
        found = "it was not built" if importlib.util.find_spec(NAME) is None else str(error)
        return (
            f"loading the C extension {NAME}, which MPI programs need: {found}; install a C compiler (cc) and then "
            "Remesh again, or run `python hatch_build.py` in a checkout"
        )
    return None
