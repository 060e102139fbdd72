"""The benchmarks of the room run, tiny, and their planner rows reach their goals."""

from __future__ import annotations

from benchmarks.reshard import planning


def test_plans_of_the_published_cases_and_of_random_pairs_stay_at_their_bound() -> None:
    rows = planning.table_2() + planning.random_specs(12)
    assert all(row.ok for row in rows), [row for row in rows if not row.ok]


def test_planning_rows_are_made_for_states_and_for_many_devices() -> None:
    rows = planning.state_dict(4) + planning.many_devices(4)
    assert all(row.value > 0 for row in rows)
