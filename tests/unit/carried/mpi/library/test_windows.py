"""Windows of a process whose lower half is slow by chance hold what it can work out; every access to memory is checked.

The same program runs on many ranks, and from MPI to MPI, in ``tests/mpi``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi.conftest import PROGRAMS
from tests.unit.carried.mpi.library.building import CheckedLibrary, output

pytestmark = pytest.mark.procs


@pytest.fixture(scope="session")
def windows(checked_library: CheckedLibrary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``windows.c`` on the library."""
    return checked_library.link(tmp_path_factory.mktemp("windows"), "loopback.c", PROGRAMS / "c" / "windows.c")


@pytest.mark.parametrize("seed", range(4))
def test_every_access_in_every_epoch_is_over_when_it_must_be(windows: Path, seed: int) -> None:
    said = output(windows, [], "3", LOOPBACK_SEED=str(seed + 1))
    assert len(said) == 1 and said[0].startswith("answer ")
