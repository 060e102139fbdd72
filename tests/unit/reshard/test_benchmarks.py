"""The benchmarks of the room run, tiny, and their planner rows reach their goals."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from benchmarks.reshard import planning, scale


def test_plans_of_the_published_cases_and_of_random_pairs_stay_at_their_bound() -> None:
    rows = planning.table_2() + planning.random_specs(12)
    assert all(row.ok for row in rows), [row for row in rows if not row.ok]


def test_planning_rows_are_made_for_states_and_for_many_devices() -> None:
    rows = planning.state_dict(4) + planning.many_devices(4)
    assert all(row.value > 0 for row in rows)


def test_the_page_of_growth_and_its_plot_are_written(tmp_path: Path) -> None:
    scale.main(tmp_path, ranks=(8, 16))
    page = (tmp_path / "scale.md").read_text()
    assert page.count("\n| ") == 1 + len(planning.PAIRS)
    assert "| move | 8 | 16 | messages |" in page
    ElementTree.fromstring((tmp_path / "scale.svg").read_text())
