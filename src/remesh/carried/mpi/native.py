"""C extension of MPI programs: the engine of a lower half, the program's short way, and their system interface.

Nothing here works without it. ``_fast.c`` and the files beside it describe what is in it.
"""

from __future__ import annotations

import importlib
import time
from typing import Any, Final

from remesh.carried.mpi.extension import NAME, find_missing
from remesh.foundation.errors import ConfigError

_SPIN_TURNS: Final = 20_000


def _load() -> Any:
    missing = find_missing()
    if missing is not None:
        raise ConfigError(missing)
    return importlib.import_module(NAME)


NATIVE: Any = _load()
"""The extension."""


def measure_spin_rate() -> float:
    """The number of turns of the C spin loop in a microsecond on this machine."""
    begin = time.perf_counter()
    NATIVE.spin(_SPIN_TURNS)
    return _SPIN_TURNS / max(1e-9, time.perf_counter() - begin) / 1e6
