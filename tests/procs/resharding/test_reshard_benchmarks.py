"""The loopback benchmark of the room runs, tiny."""

from __future__ import annotations

from benchmarks.reshard import loopback
from remesh.testbed.pool import RankPool


def test_loopback_rows_are_made(ranks: RankPool) -> None:
    rows = loopback.rows(ranks, num_rows=64, num_tensors=6, repeat=1)
    assert len(rows) == 14
    assert all(row.value > 0 for row in rows)
    bounds = {row.case: row.bound for row in rows if row.bound is not None}
    assert bounds.keys() == {
        "rows to columns, 0 MiB: run over plain messages",
        "1 to 3, 0 MiB: run over plain messages",
        "6 small tensors: gather, plan and run",
    }
