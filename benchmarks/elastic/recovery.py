"""Kill a worker, a whole node, the rendezvous' host, and wait until all survivors train: Remesh beside its peers.

All run the same training, with the same checkpoint interval where they use one, in turn, a job at a time. Time is taken
from the SIGKILL to the first step on the new mesh that the last of its ranks took. A job that does not come back in
time is lost, and told.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.elastic import peers
from benchmarks.elastic.phases import PHASES, Recovery
from benchmarks.elastic.settings import Settings
from benchmarks.elastic.sides import (
    NotRecovered,
    RemeshSide,
    Side,
    TorchrunSide,
    hurt_often,
)
from benchmarks.report import Row, at_least, at_most, spread_of

GOAL_RATIO = 20.0
MAX_LOST = 2
"""Jobs lost after which a program is given up for the case."""
ABOUT = {"worker": "one worker killed", "node": "one node killed", "host": "node with the rendezvous killed"}
KINDS: dict[str, type[Side]] = {
    "remesh": RemeshSide,
    "torchrun": TorchrunSide,
    "torchft": peers.TorchftSide,
    "nvrx": peers.NvrxSide,
}


@dataclass
class Contest:
    """One program in one case, as far as it got."""

    kind: type[Side]
    case: str
    wanted: int
    budget_s: float
    found: list[Recovery] = field(default_factory=list)
    num_lost: int = 0
    spent_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return len(self.found) >= self.wanted or self.num_lost > MAX_LOST or self.spent_s >= self.budget_s

    def take_lock(self) -> None:
        """One job, hurt a few times."""
        # A job whose store's host was killed cannot lose it again.
        often = 1 if self.case == "host" else self.kind.kills_per_job
        begun_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, self.kind(Path(folder) / "job") as side:
            try:
                for recovery in hurt_often(side, self.case, min(often, self.wanted - len(self.found))):
                    self.found.append(recovery)
                    if self.spent_s + time.monotonic() - begun_s >= self.budget_s:
                        break
            except NotRecovered as error:
                self.num_lost += 1
                print(f"{self.kind.name}, {ABOUT[self.case]}: {error}", flush=True)
        self.spent_s += time.monotonic() - begun_s


def rows_of(case: str, settings: Settings) -> Iterator[Sequence[Row]]:
    """The case's rows after each turn of all programs, over the kills so far."""
    contests = [Contest(RemeshSide, case, settings.num_kills, float("inf"))]
    versions = peers.find_versions()
    for name in settings.peers:
        kind = KINDS[name]
        if case not in kind.cases:
            continue
        if name != TorchrunSide.name and name not in versions:
            print(f"left out: {name}, which is not in {peers.FOLDER.name}/; `make peers` puts it there")
            continue
        contests.append(Contest(kind, case, settings.num_kills, 60 * settings.peer_minutes))
    while any(not contest.is_over for contest in contests):
        for contest in contests:
            if not contest.is_over:
                contest.take_lock()
        yield _rows(contests)


def _rows(contests: Sequence[Contest]) -> list[Row]:
    about, ours = ABOUT[contests[0].case], contests[0]
    rows = [at_most(f"{about}: remesh, jobs that did not come back", ours.num_lost, "jobs", 0)]
    rows += [
        Row(f"{about}: {one.kind.name}, jobs that did not come back", one.num_lost, "jobs") for one in contests[1:]
    ]
    rows += [Row(f"{about}: {one.kind.name}, kills", len(one.found) + one.num_lost, "kills") for one in contests]
    for contest in contests:
        if contest.found:
            rows += _times_of(about, contest.kind.name, contest.found)
            if contest is not ours and ours.found:
                rows += _compare(about, ours.found, contest)
    if ours.found:
        rows += [
            Row(f"{about}: remesh, {phase}, {name}", _quantile([one.phases[phase] for one in ours.found], share), "s")
            for phase in PHASES
            for name, share in _SHARES
        ]
        rows.append(at_most(f"{about}: remesh, steps lost", max(one.steps_lost for one in ours.found), "steps", 0))
    return rows


_SHARES = (("p50", 0.5), ("p95", 0.95))


def _times_of(about: str, who: str, found: Sequence[Recovery]) -> list[Row]:
    seconds = [one.seconds for one in found]
    spread = spread_of(seconds)
    rows = [
        Row(f"{about}: {who}, kill to next step, {name}", _quantile(seconds, share), "s", spread=spread)
        for name, share in _SHARES
    ]
    if who != RemeshSide.name:
        rows.append(Row(f"{about}: {who}, steps lost", max(one.steps_lost for one in found), "steps"))
    return rows


def _compare(about: str, ours: Sequence[Recovery], contest: Contest) -> list[Row]:
    rows = []
    for name, share in _SHARES:
        mine, other = (_quantile([one.seconds for one in side], share) for side in (ours, contest.found))
        case, who = f"{about}: {contest.kind.name} over remesh, {name}", contest.kind.name
        # The goal is set against torchrun, which restarts; the others stand beside us for comparison.
        goal = GOAL_RATIO if contest.kind is TorchrunSide else None
        rows.append(at_least(case, other / mine, "ratio", goal, peer=who))
    return rows


def _quantile(values: Sequence[float], share: float) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]
