"""All experiments of the room, as the environment says (`settings`); rows are written as they come.

``python -m benchmarks.reshard estimate`` only tells how long the links will take.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from benchmarks.report import Journal, Row, print_rows
from benchmarks.reshard import ablation, loopback, netns, planning
from benchmarks.reshard.settings import Settings
from remesh.testbed.pool import RankPool


def experiments(settings: Settings) -> Iterator[list[Row]]:
    """Rows of one experiment after the other."""
    num_pairs = 60 if settings.is_quick else 250
    if "planning" in settings.parts:
        yield planning.table_2()
        yield planning.random_specs(num_pairs)
        yield ablation.rows(num_pairs)
        yield planning.state_dict(200)
        for num_hosts in (16,) if settings.is_quick else (128, 1024):
            yield planning.many_devices(num_hosts)
            yield planning.over_links(num_hosts)
        yield planning.replicas_on_two_hosts(16 if settings.is_quick else 512)
    if "loopback" in settings.parts:
        with RankPool() as pool:
            yield loopback.rows(pool, num_rows=(8 if settings.is_quick else 32) << 10, num_tensors=200, repeat=5)
    if "links" in settings.parts:
        if reason := netns.why_not():
            print(f"links: skipped, {reason}")
        else:
            yield from netns.rows(settings)


def main() -> None:
    settings = Settings.of(os.environ)
    if sys.argv[1:] == ["estimate"]:
        netns.print_estimate(settings)
        return
    journal = Journal("reshard", planning.SEED, keeps=settings.keeps, notes=[f"links: {settings.links}"])
    for rows in experiments(settings):
        print_rows(rows)
        journal.add(rows)


if __name__ == "__main__":
    main()
