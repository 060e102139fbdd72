"""The benchmarks of the room run, tiny, and their planner rows reach their goals."""

from __future__ import annotations

from benchmarks.reshard import first_byte, planning


def test_plans_of_the_published_cases_and_of_random_pairs_stay_at_their_bound() -> None:
    rows = planning.table_2() + planning.random_specs(12)
    assert all(row.ok for row in rows), [row for row in rows if not row.ok]


def test_planning_rows_are_made_for_states_and_for_many_devices() -> None:
    rows = planning.state_dict(4) + planning.many_devices(4) + planning.over_links(4)
    rows += planning.replicas_on_two_hosts(2)
    assert all(row.value > 0 for row in rows)


def test_the_way_to_the_first_byte_is_measured_for_a_model() -> None:
    cost = first_byte.measure(first_byte.model_moves(2, scale=32), 0.0, 0.0)
    assert cost.messages
    stacked = first_byte.measure_stacked(first_byte.model_moves(2, scale=32), 0.0, 0.0)
    names = [row.case for row in first_byte.rows_of([cost, stacked])]
    assert len(names) == 8 and all(name.startswith("2 layers x 9 tensors") for name in names)
    assert sum("alike ones as one" in name for name in names) == 4
    assert [name for name, _, _ in map(first_byte.pair_moves, range(2))] == [
        "S01R @ 128x8 to RS01 @ 128x8",
        "S01R @ 125x8 to RS01 @ 128x8",
    ]
