"""What a job tells, as a test hears it."""

from __future__ import annotations

from pathlib import Path

import pytest

from remesh.elasticity.telemetry.events import EventLog
from remesh.testbed.local_job import LocalJob
from tests.support.hold import Hold

pytestmark = pytest.mark.procs  # looks again after a moment


def _job_that_told(folder: Path, *kinds: str) -> LocalJob:
    job = LocalJob(folder, [])
    log = EventLog(folder / "events", "worker-1")
    for number, kind in enumerate(kinds):
        log.write(kind, number=number)
    log.close()
    return job


def test_events_that_come_together_are_waited_for_one_by_one(tmp_path: Path) -> None:
    job = _job_that_told(tmp_path, "step", "step", "end")
    assert [job.wait_for(lambda event: event["kind"] == "step", 1.0)["number"] for _ in range(2)] == [0, 1]
    job.worker_pids("a")  # looks at the events, too
    assert [event["kind"] for event in job.follow(1.0)] == ["end"]


def test_a_job_that_ends_before_all_ranks_hold_is_no_wait(tmp_path: Path) -> None:
    job, hold = _job_that_told(tmp_path, "held", "held"), Hold(tmp_path, 3)
    hold.wait(job, 2, 1.0)
    with pytest.raises(TimeoutError, match="ended without the event"):
        hold.wait(job, 1, 1.0)
