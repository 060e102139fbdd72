"""Files that a recovery walks through: a survivor and a spare, filled from the survivor's memory."""

from __future__ import annotations

from remesh.testbed.pool import RankPool
from tests.procs.elasticity.test_fill import fill_from_replicas
from tests.unit.checkpoint.test_walk import walk_of


def walk() -> int:
    fill_from_replicas()  # imports
    return len(walk_of(fill_from_replicas).called)


def test_a_recovery_from_memory_walks_forty_five_files(ranks: RankPool) -> None:
    assert max(ranks.run(walk, 3)) <= 45
