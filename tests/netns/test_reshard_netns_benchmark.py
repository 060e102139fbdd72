"""The testbed benchmark runs, tiny: every kind of contestant, right bits, right bytes on the wire."""

from __future__ import annotations

import pytest

from benchmarks.reshard import netns
from benchmarks.reshard.netns_cases import GLOO, ONE_BY_ONE, Case, all_cases

pytestmark = pytest.mark.netns

CASES = {case.name.split(":")[0]: case for case in all_cases(1 << 18, 2)}


@pytest.mark.parametrize("name", ["F5 1 -> (2,2)", "F6-6", "N1", "N2", "N3a", "N3b", "N3c", "N5", "N6"])
def test_a_case_is_timed_beside_its_peers(name: str) -> None:
    case = CASES[name]
    rows = netns.rows_of(case, repeat=1)
    assert {row.peer for row in rows if row.unit == "x bound"} == {None, *case.peers}
    assert all(row.value > 0.5 for row in rows if row.unit == "x bound")


def test_many_tensors_are_faster_together() -> None:
    case = CASES["N4"]
    few = Case(case.name, case.moves[:12], case.host_of, case.goal, case.peers)
    rows = netns.rows_of(few, repeat=1)
    assert any(row.peer == ONE_BY_ONE and row.unit == "ratio" for row in rows)


def test_bytes_on_the_wire_are_those_of_the_plan() -> None:
    (row,) = [row for row in netns.rows_of(CASES["F5 1 -> (1,1)"], repeat=1) if "NICs" in row.case]
    assert 1.0 <= row.value < 1.3  # so few bytes that answers and agreement count


def test_the_backends_own_broadcast_stands_beside_ours() -> None:
    assert all(GLOO in case.peers for name, case in CASES.items() if name.startswith("F5") and "(1,1)" not in name)
