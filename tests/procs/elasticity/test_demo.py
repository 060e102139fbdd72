"""The demo is a program for people at a terminal: they may stop it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remesh.elasticity.telemetry.events import EventReader
from remesh.foundation.linux.procfs import children_of, start_of, work_of
from remesh.testbed.quiet_limit import QuietLimit

pytestmark = pytest.mark.procs
DEMO = Path(__file__).parents[3] / "examples" / "demo" / "run.py"
QUIET_S = 60.0


@pytest.mark.slow  # it starts as many processes as the demo, and CI runs it
def test_a_demo_that_is_stopped_by_ctrl_c_leaves_nothing_running(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, str(DEMO), "--folder", str(folder)]
    with (tmp_path / "log").open("wb") as log:
        demo = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=_obey_ctrl_c)
    try:
        events = wait_for_workers(folder / "main" / "events", demo)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(3 * QUIET_S) == 128 + signal.SIGINT, (tmp_path / "log").read_text()
    finally:
        demo.kill()
        demo.wait(3 * QUIET_S)
    pids = [event["pid"] for event in events if event["kind"] in ("agent", "worker-started")]
    assert not [pid for pid in pids if start_of(pid) is not None]
    assert (tmp_path / "log").read_text().splitlines()[-1] == "demo stopped; nothing of it runs on"


def _obey_ctrl_c() -> None:
    """As in a terminal, also where the tests run in the background of a shell, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_workers(folder: Path, demo: subprocess.Popen[bytes]) -> list[dict[str, object]]:
    """What is told until all four workers have been started."""
    reader, events = EventReader(folder), []
    limit = QuietLimit(lambda: (len(events), *map(work_of, [demo.pid, *children_of(demo.pid)])), QUIET_S)
    while sum(event["kind"] == "worker-started" for event in events) < 4:
        assert demo.poll() is None and not limit.is_over(), events
        events += reader.poll()
        time.sleep(0.02)
    return events
