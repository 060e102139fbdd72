"""The ablation runs, tiny, and ours is at the bound in it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.reshard import ablation


@pytest.mark.slow
def test_rows_of_ours_reach_their_goals() -> None:
    rows = ablation.rows(num_pairs=6)
    goals = [row for row in rows if row.goal is not None]
    assert len(goals) == len(ablation.TABLE_2) + len(ablation.MESHES) + 3
    assert all(row.ok for row in goals), [row for row in goals if not row.ok]


@pytest.mark.slow
def test_the_page_and_its_plots_are_written(tmp_path: Path) -> None:
    ablation.main(tmp_path, num_pairs=2)
    assert "| case 6 | 2.00 | 2.00 | 1.00 |" in (tmp_path / "ablation.md").read_text()
    for name in ("ablation-orders.svg", "ablation-ways.svg"):
        ElementTree.fromstring((tmp_path / name).read_text())
