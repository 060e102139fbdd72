"""The benchmark of the room, once per case: both programs come back, and ours loses no step."""

import pytest

from benchmarks.elastic.recovery import rows


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_programs_come_back_and_ours_loses_no_step() -> None:
    values = {row.case: row.value for row in rows(1)}
    assert values["one worker killed: remesh, steps lost"] == 0
    assert values["one node killed: remesh, steps lost"] == 0
    assert all(value > 0 for case, value in values.items() if "kill to next step" in case)
