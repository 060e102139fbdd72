"""Kill a worker, a whole node, the rendezvous' host, and wait until all survivors train: Remesh beside torchrun.

Both run the same training with the same checkpoint interval, in turn, a few kills at a time. Time is taken from the
SIGKILL to the first step on the new mesh that the last of its ranks took.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.elastic.phases import PHASES, Recovery
from benchmarks.elastic.sides import (
    NotRecovered,
    RemeshSide,
    TorchrunSide,
    hurt_often,
    wait_for_steps,
    wait_until_full,
)
from benchmarks.report import Row, at_least, at_most

GOAL_RATIO = 20.0
KILLS_IN_TURN = 5
MAX_LOST = 2
"""Jobs lost in one turn after which it is given up."""
HOST_TIMEOUT_S = 30.0
"""How long a job may take to come back without its rendezvous' host: four times torchrun's usual recovery."""


def rows(num_kills: int) -> list[Row]:
    """All cases; ``num_kills`` of each on each side, but of rendezvous' hosts, which need a new job each, a fifth."""
    found: list[Row] = []
    for case in ("worker", "node"):
        ours: list[Recovery] = []
        theirs: list[Recovery] = []
        lost = {RemeshSide.name: 0, TorchrunSide.name: 0}
        for begun in range(0, num_kills, KILLS_IN_TURN):
            now = min(KILLS_IN_TURN, num_kills - begun)
            for kind, found_here in ((RemeshSide, ours), (TorchrunSide, theirs)):
                lost[kind.name] += _hurt_job(kind, case, now, found_here)
        about = f"one {case} killed"
        found.append(at_most(f"{about}: remesh, jobs that did not come back", lost[RemeshSide.name], "jobs", 0))
        found.append(Row(f"{about}: torchrun, jobs that did not come back", lost[TorchrunSide.name], "jobs"))
        if ours and theirs:
            found += _compare(about, ours, theirs)
    return found + _rows_of_hosts(max(1, num_kills // KILLS_IN_TURN))


def _hurt_job(kind: type[RemeshSide] | type[TorchrunSide], case: str, num_kills: int, found: list[Recovery]) -> int:
    """Kill so many times, in one job, or in more where one is lost; how many were."""
    num_lost, wanted = 0, len(found) + num_kills
    while len(found) < wanted and num_lost <= MAX_LOST:
        with tempfile.TemporaryDirectory() as folder, kind(Path(folder) / "job") as side:
            try:
                for recovery in hurt_often(side, case, wanted - len(found)):
                    found.append(recovery)
            except NotRecovered as error:
                num_lost += 1
                print(f"{kind.name}, one {case} killed: {error}", flush=True)
    return num_lost


def _compare(about: str, ours: Sequence[Recovery], theirs: Sequence[Recovery]) -> list[Row]:
    found = []
    for name, share in (("p50", 0.5), ("p95", 0.95)):
        mine, other = (_quantile([one.seconds for one in side], share) for side in (ours, theirs))
        found += [
            at_least(f"{about}: torchrun over remesh, {name}", other / mine, "ratio", GOAL_RATIO, peer="torchrun"),
            Row(f"{about}: remesh, kill to next step, {name}", mine, "s", spread=_spread(ours)),
            Row(f"{about}: torchrun, kill to next step, {name}", other, "s", spread=_spread(theirs)),
        ]
        found += [
            Row(f"{about}: remesh, {phase}, {name}", _quantile([one.phases[phase] for one in ours], share), "s")
            for phase in PHASES
        ]
    found.append(at_most(f"{about}: remesh, steps lost", max(one.steps_lost for one in ours), "steps", 0))
    found.append(Row(f"{about}: torchrun, steps lost", max(one.steps_lost for one in theirs), "steps"))
    return found


def _rows_of_hosts(num_kills: int) -> list[Row]:
    """The node that hosts the store is killed: a new job for each kill."""
    about = "node with the rendezvous killed"
    found = []
    for kind, goal in ((RemeshSide, 1.0), (TorchrunSide, None)):
        back: list[Recovery] = []
        for _ in range(num_kills):
            back += _host_killed(kind)
        share = len(back) / num_kills
        case = f"{about}: {kind.name}, share of jobs that came back within {HOST_TIMEOUT_S:g} s"
        found.append(Row(case, share, "ratio") if goal is None else at_least(case, share, "ratio", goal))
        if back:
            seconds = _quantile([one.seconds for one in back], 0.5)
            found.append(Row(f"{about}: {kind.name}, kill to next step, p50", seconds, "s", spread=_spread(back)))
    return found


def _host_killed(kind: type[RemeshSide] | type[TorchrunSide]) -> list[Recovery]:
    with tempfile.TemporaryDirectory() as folder, kind(Path(folder) / "job", hosts_store=True) as side:
        try:
            before = wait_until_full(side)
            killed_s = side.hurt("rendezvous host")
            return [wait_for_steps(side, "rendezvous host", killed_s, before, HOST_TIMEOUT_S)]
        except NotRecovered:
            return []


def _quantile(values: Sequence[float], share: float) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def _spread(side: Sequence[Recovery]) -> float:
    return max(one.seconds for one in side) / min(one.seconds for one in side) - 1
