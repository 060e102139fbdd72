"""Messages of every kind against an oracle that knows only who sends what to whom.

They run in one process whose lower half is slow by chance; every access to memory is checked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi.random_messages import PROGRAM, expected_lines
from tests.profiles import seeds
from tests.unit.carried.mpi.library.building import CheckedLibrary, output

pytestmark = pytest.mark.procs


@pytest.fixture(scope="session")
def program(checked_library: CheckedLibrary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``random_messages.c`` on the library."""
    return checked_library.link(tmp_path_factory.mktemp("loopback"), "loopback.c", *PROGRAM)


@pytest.mark.parametrize("seed", seeds(8, quick=3))
def test_messages_arrive_whole_by_whatever_calls_they_are_sent_received_and_completed(program: Path, seed: int) -> None:
    steps = 30
    printed = output(program, [], str(seed), str(steps), LOOPBACK_SEED=str(1000 + seed))
    assert printed == [*expected_lines(seed, steps, 1), f"answer {steps} steps"]
