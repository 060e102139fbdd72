"""What gets nowhere is given up, and what is slow is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.mpi import patience
from tests.mpi.conftest import Job

pytestmark = pytest.mark.mpi
_WAITS = "from mpi4py import MPI; MPI.COMM_WORLD.recv()"
_COMPUTES = """
import time
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 0:
    while time.process_time() < 6:
        pass
MPI.COMM_WORLD.barrier()
"""


@pytest.mark.parametrize(("source", "state"), [(_WAITS, "failed"), (_COMPUTES, "finished")])
def test_a_stay_ends_when_no_program_works(job: Job, monkeypatch: pytest.MonkeyPatch, source: str, state: str) -> None:
    monkeypatch.setattr(patience, "QUIET_S", 4.0)
    job.create(Path(sys.executable), "-c", source, num_ranks=2)
    outcome = job.stay("mpich").outcome
    assert outcome.state == state, job.events
    assert state == "finished" or "got nowhere" in outcome.cause
