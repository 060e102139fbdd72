"""Restart mode: after a worker was killed, the very next attempt of all comes through."""

from __future__ import annotations

import pytest

from benchmarks.elastic.attempts import MEETINGS, kill_once
from benchmarks.elastic.etcd_server import why_no_etcd
from tests.procs.agents import last_event_of_agent

pytestmark = [pytest.mark.procs, pytest.mark.slow]


@pytest.mark.parametrize("meeting", MEETINGS)
def test_workers_meet_at_the_first_attempt_after_a_kill(meeting: str) -> None:
    if meeting == "etcd" and (missing := why_no_etcd()):
        pytest.skip(missing)
    trial = kill_once("remesh", meeting, "--event-log-handler", "console")
    assert trial.at_first, trial
    assert "failed (exitcode: -9)" in trial.output  # torch's own line
    assert "workers failed; all workers of" in trial.output
    assert "are started again; 2 restarts left" in trial.output
    # torch's own events, as under torchrun: of each worker, and of the agent as the last.
    assert last_event_of_agent(trial.output)["metadata"]["state"] == "SUCCEEDED"
