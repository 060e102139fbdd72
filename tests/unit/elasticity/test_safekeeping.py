"""Snapshots that are due, and those that did not arrive: one rank, whose taker only counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from remesh.elasticity.telemetry.events import EventLog
from remesh.elasticity.training.place import JobOptions, RankPlace
from remesh.elasticity.training.safekeeping import Safekeeping


def make_safekeeping(told: list[str], again: list[int]) -> Safekeeping:
    taker = SimpleNamespace(send_again=lambda: again.append(1))
    place = cast(RankPlace, SimpleNamespace(plan=SimpleNamespace(number=1), rank=0, taker=taker))
    options = JobOptions(seed=0, checkpoint=None, save_every=None, snapshot_every=5)
    return Safekeeping(place, options, EventLog(None, "worker", lambda event: told.append(event["kind"])))


def test_snapshot_is_due_by_the_step_alone_while_the_last_one_is_kept() -> None:
    kept = make_safekeeping(told := [], again := [])
    assert [step for step in range(12) if kept.is_snapshot_due(step)] == [5, 10]
    assert (told, again) == ([], [])


def test_snapshot_that_is_not_kept_goes_first_when_the_next_one_is_due() -> None:
    kept = make_safekeeping(told := [], again := [])
    kept.is_any_rank_sending = True
    assert not any(kept.is_snapshot_due(step) for step in range(12))
    assert (told, len(again)) == (["snapshot-left-out"] * 2, 2)
    kept.is_any_rank_sending = False
    assert kept.is_snapshot_due(15)
    assert len(again) == 2
