"""Lower bounds of recovery times: each phase beside the least that it takes, kill by kill, in the same run.

    KILLS=20 python -m benchmarks.elastic.bounds

A worker of four is killed as in `recovery`; after each recovery, while the job goes on, its bounds are measured on the
same machine, so that what else it does falls on both:

- *computing*: nothing; a rank that computes hears of nothing, and the program's steps are as long as they are;
- *noticed*: from the SIGKILL of a process as large as a worker until the kernel says that it has ended;
- *met*, *planned*: three processes, one store: each writes a key and waits for one of another;
- *rebuilt*: two gloo groups of the survivors, made by the backend alone, without a mesh;
- *moved*: model and optimizer made, the empty step that makes moments, and one small gather;
- *first step*: the step of a program without elasticity, in new groups.

docs/elastic/recovery.md is the page of its report, of a quiet machine.
"""

from __future__ import annotations

import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.elastic.model import BATCH_SIZE, Samples, make_model
from benchmarks.elastic.phases import PHASES, Recovery
from benchmarks.elastic.settings import Settings
from benchmarks.elastic.sides import NotRecovered, RemeshSide, hurt_often
from benchmarks.report import OUT, Row, median_of, write_report
from remesh.comm.gather import all_gather_json
from remesh.testbed.pool import RankPool

NUM_SURVIVORS = RemeshSide.survivors["worker"]
GOAL_S = 0.06
_WHOLE = "kill to next step"
_SLEEPER = "import sys, time, torch\nsys.stdout.write('here\\n')\nsys.stdout.flush()\ntime.sleep(600)"
_TIMEOUT = timedelta(seconds=60)
Times = dict[str, float]
"""Seconds by phase."""


def measure(num_kills: int, folder: Path) -> tuple[list[Recovery], list[Times]]:
    """Recoveries, and the bounds that were measured after each; as many as there were until a job did not come back."""
    recoveries: list[Recovery] = []
    bounds: list[Times] = []
    with RankPool(NUM_SURVIVORS) as pool:
        pool.run(bounds_of_ranks, NUM_SURVIVORS, timeout_s=300)
        while len(recoveries) < num_kills:
            often = min(RemeshSide.kills_per_job, num_kills - len(recoveries))
            with RemeshSide(folder / f"job{len(recoveries)}") as side:
                try:
                    for recovery in hurt_often(side, "worker", often):
                        bounds.append(_bounds_after(recovery, pool))
                        recoveries.append(recovery)
                except NotRecovered as error:
                    if not recoveries:
                        raise
                    print(f"ended after {len(recoveries)} kills: {error}", flush=True)
                    break
    return recoveries, bounds


def _bounds_after(recovery: Recovery, pool: RankPool) -> Times:
    by_rank = pool.run(bounds_of_ranks, NUM_SURVIVORS, timeout_s=300)
    slowest = {phase: max(each[phase] for each in by_rank) for phase in by_rank[0]}
    return {"computing": recovery.phases["computing"], "noticed": _seconds_of_an_end()} | slowest


def _seconds_of_an_end() -> float:
    """From a SIGKILL until the kernel says that the process, with torch in it, has ended."""
    with subprocess.Popen([sys.executable, "-c", _SLEEPER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        life = os.pidfd_open(process.pid)
        try:
            started_s = time.perf_counter()
            process.send_signal(signal.SIGKILL)
            select.select([life], [], [])
            return time.perf_counter() - started_s
        finally:
            os.close(life)


def bounds_of_ranks() -> Times:
    """The bounds that the survivors have together; each phase begins together."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    store = dist.PrefixStore("bounds", dist.distributed_c10d._get_default_store())
    found: Times = {}

    def take(phase: str, act: Callable[[], Any]) -> Any:
        dist.barrier(world)
        started_s = time.perf_counter()
        made = act()
        found[phase] = time.perf_counter() - started_s
        return made

    def ask(key: str) -> None:
        store.set(f"{key}/{rank}", "here")
        store.get(f"{key}/{(rank + 1) % size}")

    def make_groups() -> list[Any]:
        stores = [dist.PrefixStore(f"groups/{number}", store) for number in range(2)]
        return [dist.ProcessGroupGloo(each, rank, size, _TIMEOUT) for each in stores]

    def make_state() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = make_model()
        optim = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optim.step()
        all_gather_json("here", world)
        return model, optim

    take("met", lambda: ask("met"))
    take("planned", lambda: ask("planned"))
    steps, votes = take("rebuilt", make_groups)
    model, optim = take("moved", make_state)
    take("first step", lambda: _take_step(model, optim, steps, votes))
    return found


def _take_step(
    model: torch.nn.Module, optim: torch.optim.Optimizer, steps: dist.ProcessGroup, votes: dist.ProcessGroup
) -> None:
    samples = Samples()
    x = torch.stack([samples[index] for index in range(BATCH_SIZE // steps.size())])
    optim.zero_grad()
    (model(x) - x).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        steps.allreduce([parameter.grad]).wait()
    votes.allreduce([torch.zeros(7, dtype=torch.int64)]).wait()
    optim.step()


def rows_of(recoveries: Sequence[Recovery], bounds: Sequence[Times]) -> list[Row]:
    """A row for each phase and one for the whole, with their bounds: medians over the kills."""
    rows = []
    for phase in PHASES:
        bound = statistics.median(each[phase] for each in bounds)
        rows.append(Row(phase, statistics.median(one.phases[phase] for one in recoveries), "s", bound=bound))
    seconds = [one.seconds for one in recoveries]
    bound = statistics.median(sum(each.values()) for each in bounds)
    rows.append(median_of(_WHOLE, seconds, "s", GOAL_S, bound=bound))
    after = [one.seconds - one.phases["computing"] for one in recoveries]
    least = statistics.median(sum(each.values()) - each["computing"] for each in bounds)
    rows.append(Row(f"{_WHOLE}, without computing", statistics.median(after), "s", bound=least))
    rows.append(Row("kills", len(recoveries), "kills"))
    return rows


def main(settings: Settings, folder: Path = OUT) -> None:
    """Measure, and write the report."""
    with tempfile.TemporaryDirectory() as name:
        write_report("elastic-recovery", rows_of(*measure(settings.num_kills, Path(name))), folder=folder)


if __name__ == "__main__":
    main(Settings.of(os.environ))
