"""What stands beside a program takes little memory, and takes nothing from the program for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from remesh.carried.mpi.mpi_job import Watch
from remesh.carried.rounds.leader import Coordinator
from remesh.foundation.linux.procfs import children_of
from tests.mpi.conftest import Job, ending_once, stop_after
from tests.mpi.patience import wait_until

pytestmark = pytest.mark.mpi


class _Look:
    """Looks at the lower half of rank 0 and at its program, once all have come up; then another watch goes on."""

    def __init__(self, then: Watch | None = None) -> None:
        self.huge_pages: dict[str, str] = {}
        self.tunables: dict[str, str] = {}
        self._then = then

    def __call__(self, coordinator: Coordinator) -> None:
        if coordinator.all_ready and not self.huge_pages:
            lower = int(coordinator.describe()["ranks"][0]["pid"])
            (init,) = children_of(lower)
            wait_until(lambda: bool(children_of(init)), lambda: "no program")
            for name, pid in (("lower half", lower), ("program", children_of(init)[0])):
                place = Path(f"/proc/{pid}")
                told = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
                self.huge_pages[name] = told.get("THP_enabled", "").strip()
                variables = (place / "environ").read_text().split("\0")
                self.tunables[name] = next((each for each in variables if each.startswith("GLIBC_TUNABLES=")), "")
        if self._then is not None:
            self._then(coordinator)


@pytest.mark.parametrize("mpi", [pytest.param("mpich", marks=pytest.mark.slow), "openmpi", "impi"])
def test_only_the_lower_half_does_without_huge_pages_and_restartable_sequences(job: Job, mpi: str) -> None:
    job.create("ring", 40, 0.02, num_ranks=2)
    begun, back = _Look(stop_after(0.2)), _Look()
    assert job.stay(mpi, watch=begun).outcome.state == "stopped", job.events
    then_end = ending_once(job, lambda _: bool(back.huge_pages), back)
    ended = job.stay(mpi, checkpoint=job.folder.checkpoint(None), watch=then_end)
    assert ended.outcome.state == "finished", job.events
    for look in (begun, back):
        assert look.huge_pages == {"lower half": "0", "program": "1"}
        assert "rseq=0" in look.tunables["lower half"] and "rseq" not in look.tunables["program"]
    assert job.answer is not None
