"""All experiments of the room, as the environment says (:mod:`benchmarks.elastic.settings`).

Rows are written as they come, so an interrupted run keeps what it has. ``python -m benchmarks.elastic estimate`` only
tells how long it will take.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.elastic import (
    attempts,
    control_plane,
    launcher_start,
    overhead,
    peers,
    recovery,
    shaped,
    store_requests,
)
from benchmarks.elastic.settings import Settings, estimate_minutes
from benchmarks.elastic.sides import CASES
from benchmarks.report import OUT, Journal, Row, print_rows
from benchmarks.reshard.netns import why_not


def experiments(settings: Settings) -> Iterator[Sequence[Row]]:
    """Rows as they come; later ones of a case take the place of earlier ones."""
    quick = settings.is_quick
    if "costs" in settings.parts:
        yield overhead.rows(60 if quick else 300, 64)
        yield store_requests.rows(1_000 if quick else 10_000)
    for case in CASES:
        if case in settings.parts:
            yield from recovery.rows_of(case, settings)
    if "attempts" in settings.parts:
        if "torchrun" in settings.peers:
            yield launcher_start.rows(1 if quick else 5)
        for meeting in attempts.MEETINGS:
            yield from attempts.rows_of(meeting, settings)
    if "plane" in settings.parts:
        yield control_plane.rows(quick=quick)
    if "shaped" in settings.parts:
        if missing := why_not():
            print(f"left out: recovery on shaped links, which {missing}")
        else:
            yield shaped.rows(quick=quick)


def run(settings: Settings, folder: Path = OUT) -> None:
    """Measure; the report is written again whenever rows come."""
    versions = [f"{name} {version}" for name, version in peers.find_versions().items()]
    journal = Journal("elastic", None, folder, keeps=settings.keeps, notes=versions)
    for rows in experiments(settings):
        journal.add(rows)
    print_rows(journal.rows)


def print_estimate(settings: Settings) -> None:
    minutes = estimate_minutes(settings)
    for part, value in minutes.items():
        print(f"{part:<8} {value:5.1f} minutes")
    print(f"{'all':<8} {sum(minutes.values()):5.1f} minutes")


if __name__ == "__main__":
    if sys.argv[1:] == ["estimate"]:
        print_estimate(Settings.of(os.environ))
    else:
        run(Settings.of(os.environ))
