"""Pause of a job at a step, until a test has injected its fault.

A job of so many steps may be over, or have saved once more, before a test on a busy machine gets to its next line.

    script                                    test
    wait_if_held(job, options.hold)           hold = Hold(folder, step=14)
      step 14 of generation 1: "held" ──────> hold.wait(job, num_ranks=4, quiet_s=90.0)
      ...                                     job.kill_node("b")
      goes on <────────────────────────────── hold.end()
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from remesh.testbed.local_job import POLL_S, LocalJob

_KIND = "held"


class Hold:
    """A step of a job's first generation at which all ranks wait; used once."""

    def __init__(self, folder: Path, step: int) -> None:
        self._gate = folder / "held-no-longer"
        self.flags = ("--hold", f"{step}:{self._gate}")
        """For the script, which gives the value to `wait_if_held` before each step."""

    def wait(self, job: LocalJob, num_ranks: int, quiet_s: float) -> None:
        """Return when so many ranks stand at the step. TimeoutError as `LocalJob.wait_for`."""
        for _ in range(num_ranks):
            job.wait_for(lambda event: event["kind"] == _KIND, quiet_s)

    def end(self) -> None:
        """The ranks go on."""
        self._gate.touch()


def wait_if_held(job: Any, hold: str | None) -> None:
    """Called by every rank of a script with the value of its option ``--hold``."""
    step, _, gate = (hold or "").partition(":")
    if not hold or job.generation != 1 or job.step != int(step):
        return
    job.log(_KIND)
    while not Path(gate).exists():
        time.sleep(POLL_S)
