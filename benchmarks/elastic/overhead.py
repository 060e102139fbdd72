"""Overhead while nothing fails: votes, data position, health and snapshots, as a share of a 100 ms step.

Two nodes with one worker each, a state sharded over both. The time from the end of a step's own work, where all ranks
have just met, to the begin of the next step's is Remesh's. The work itself is a sleep: that sending snapshots takes
cores away from it does not show. Run it from the root of the repository.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.elastic.overhead_script import STEP_S
from benchmarks.report import Row, at_most, spread_of
from remesh.testbed.local_job import LocalJob

SNAPSHOT_EVERY = 10
GOAL_QUIET, GOAL_SNAPSHOTS = 0.01, 0.03
TIMEOUT_S = 300.0
SCRIPT = "benchmarks.elastic.overhead_script"


def rows(num_steps: int, state_mib: int) -> list[Row]:
    """Without snapshots and with them."""
    quiet, floors = _overheads(num_steps, 1, None)
    base_s = statistics.median(quiet)
    with_snapshots, _ = _overheads(num_steps, state_mib, SNAPSHOT_EVERY)
    windows = [
        sum(with_snapshots[start : start + SNAPSHOT_EVERY]) / SNAPSHOT_EVERY
        for start in range(0, len(with_snapshots) - SNAPSHOT_EVERY + 1, SNAPSHOT_EVERY)
    ]
    snapshots_s = max(0.0, statistics.median(windows) - base_s)
    deciles = statistics.quantiles(quiet, n=10)
    return [
        at_most(
            "vote, position and health, share of a 100 ms step",
            base_s / STEP_S,
            "ratio",
            GOAL_QUIET,
            bound=statistics.median(floors) / STEP_S,
            spread=deciles[-1] / deciles[0] - 1,
        ),
        Row("the same, less a bare all-reduce of four numbers", (base_s - statistics.median(floors)) / STEP_S, "ratio"),
        at_most(
            f"snapshots of {state_mib} MiB per rank each {SNAPSHOT_EVERY} steps, share of a 100 ms step",
            snapshots_s / STEP_S,
            "ratio",
            GOAL_SNAPSHOTS,
            spread=spread_of(windows),
        ),
    ]


def _overheads(num_steps: int, state_mib: int, snapshot_every: int | None) -> tuple[list[float], list[float]]:
    """Seconds inside Remesh after each step, of rank 0, and of a bare all-reduce beside it."""
    script = ["-m", SCRIPT, "--steps", str(num_steps), "--state-mib", str(state_mib)]
    if snapshot_every is not None:
        script += ["--snapshot-every", str(snapshot_every)]
    with tempfile.TemporaryDirectory() as folder, LocalJob(Path(folder), script, nnodes="2", workers_per_node=1) as job:
        job.start_node("a")
        job.start_node("b")
        codes = job.wait(TIMEOUT_S)
        assert codes == {"a": 0, "b": 0}, job.describe_logs()
        if snapshot_every is not None:
            assert job.of_kind("snapshot-kept"), "no snapshot was taken"
        told = job.of_kind("overhead", rank=0)
        return [event["seconds"] for event in told], [event["floor"] for event in told]
