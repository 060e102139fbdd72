"""What gets nowhere is given up, and what is slow is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi import patience
from tests.mpi.conftest import Job, stop_after
from tests.mpi.test_library import compiled

pytestmark = pytest.mark.mpi
_IN_CI = [pytest.param(program, marks=pytest.mark.slow) for program in ("master", "ring.c")]
_WAITS = "from mpi4py import MPI; MPI.COMM_WORLD.recv()"
_COMPUTES = """
import time
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 0:
    while time.process_time() < 6:
        pass
MPI.COMM_WORLD.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("source", "state"), [(_WAITS, "failed"), (_COMPUTES, "finished")])
def test_a_stay_ends_when_no_program_works(job: Job, monkeypatch: pytest.MonkeyPatch, source: str, state: str) -> None:
    monkeypatch.setattr(patience, "QUIET_S", 4.0)
    job.create(Path(sys.executable), "-c", source, num_ranks=2)
    outcome = job.stay("mpich").outcome
    assert outcome.state == state, job.events
    assert state == "finished" or "got nowhere" in outcome.cause


def test_a_program_that_works_is_waited_for_and_one_that_does_not_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "QUIET_S", 4.0)
    works = "import time\nwhile time.process_time() < 6: pass\nprint('done')"
    done = patience.run_patiently([sys.executable, "-c", works], os.environ)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    with pytest.raises(subprocess.TimeoutExpired):
        patience.run_patiently([sys.executable, "-c", "import time; time.sleep(1000)"], os.environ)
    with pytest.raises(AssertionError, match="nobody came"):
        patience.wait_until(lambda: False, lambda: "nobody came")


@pytest.mark.parametrize(
    "program", [*("ring", "pool", "executor", "walkers", "ledger", "unreceived", "threads.c"), *_IN_CI]
)
def test_a_program_that_would_be_over_waits_for_who_comes_late_to_stop_it(
    job: Job, tmp_path: Path, program: str
) -> None:
    name, is_c, _ = program.partition(".c")
    job.create(compiled(name, "mpich", tmp_path) if is_c else name, 3, 0, num_ranks=2)
    stopped = job.stay("mpich", watch=stop_after(3.0))
    assert stopped.outcome.state == "stopped" and job.answer is None, job.events
    ended = job.stay("openmpi", checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished" and job.answer is not None, job.events
