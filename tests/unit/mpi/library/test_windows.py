"""Windows of a process whose lower half is slow by chance hold what it can work out; every access to memory is checked.

The same program runs on many ranks, and from MPI to MPI, in ``tests/mpi``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi.conftest import PROGRAMS
from tests.unit.mpi.library.building import build_lone, has_compiler, output

pytestmark = pytest.mark.procs


@pytest.fixture(scope="session", params=["mpich", "openmpi", "abi"])
def windows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``windows.c`` on the library, in each face."""
    if not has_compiler():
        pytest.skip("no C compiler (cc) on PATH")
    folder = tmp_path_factory.mktemp("windows")
    return build_lone(request.param, PROGRAMS / "c" / "windows.c", folder, lower="loopback.c")


@pytest.mark.parametrize("seed", range(4))
def test_every_access_in_every_epoch_is_over_when_it_must_be(windows: Path, seed: int) -> None:
    said = output(windows, [], "3", LOOPBACK_SEED=str(seed + 1))
    assert len(said) == 1 and said[0].startswith("answer ")
