"""The benchmarks of the room, small: both programs come back, and ours loses no step; costs are measured."""

import pytest

from benchmarks.elastic import overhead, store_requests
from benchmarks.elastic.recovery import rows_of
from benchmarks.elastic.settings import Settings


@pytest.mark.long
@pytest.mark.timeout(600)
def test_costs_of_a_quiet_job_are_measured() -> None:
    quiet, _, snapshots = overhead.rows(30, 1)
    assert quiet.goal == 0.01 and quiet.value > 0
    assert snapshots.goal == 0.03 and snapshots.value >= 0


@pytest.mark.long
def test_requests_through_tls_are_measured_beside_those_in_the_clear() -> None:
    found = store_requests.rows(100)
    assert len(found) in (0, 7)
    assert all(row.value > 0 for row in found if "door adds" not in row.case)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["worker", "node"])
def test_all_programs_come_back_and_ours_loses_no_step(case: str) -> None:
    last = list(rows_of(case, Settings(num_kills=1)))[-1]
    values = {row.case: row.value for row in last}
    about = f"one {case} killed"
    assert values[f"{about}: remesh, steps lost"] == 0
    assert values[f"{about}: torchrun over remesh, p50"] > 0
    assert all(value > 0 for name, value in values.items() if "kill to next step" in name)
