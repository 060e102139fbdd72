"""The ablation runs, tiny, and ours is at the bound in it."""

from __future__ import annotations

from dataclasses import asdict
from xml.etree import ElementTree

import pytest

from benchmarks.pages import PAGES
from benchmarks.reshard import ablation


@pytest.mark.slow
def test_rows_of_ours_reach_their_goals() -> None:
    rows = ablation.rows(num_pairs=6)
    goals = [row for row in rows if row.goal is not None]
    assert len(goals) == len(ablation.TABLE_2) + len(ablation.MESHES) + 3
    assert all(row.ok for row in goals), [row for row in goals if not row.ok]


@pytest.mark.slow
def test_the_page_has_every_case_and_its_plots() -> None:
    (page,) = (page for page in PAGES if page.name == "reshard/ablation")
    found = page.find({"rows": [asdict(row) for row in ablation.rows(num_pairs=2)]})
    orders = page.tables["orders"].lines(found["orders"])
    assert any(line.startswith("| case 6 | 2.00 | 2.00 | 1.00 |") for line in orders)
    for name in ("orders", "ways"):
        picture = page.tables[name].picture
        assert picture is not None
        ElementTree.fromstring(picture.draw(found[name]))
