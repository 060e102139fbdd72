"""The testbed benchmark of pipelines runs, tiny: every contestant, the predicted peaks."""

from __future__ import annotations

import pytest

from benchmarks.pipeline import measured
from remesh.pipeline import Lines

pytestmark = pytest.mark.netns


@pytest.mark.parametrize(("num_stages", "lines"), [(2, Lines.NIC), (3, Lines.HOP)])
def test_a_case_is_timed_beside_its_peers(num_stages: int, lines: Lines) -> None:
    case = measured.stub_case(num_stages, 4, 0.5, goal=0.9, forward_s=0.01, lines=lines)
    rows = measured.rows_of(measured.measure_case(case, repeat=1))
    found = {row.case.partition(": ")[2]: row for row in rows}
    for name in (measured.OURS, measured.ASYNC, measured.EAGER, measured.BLOCKING, measured.TORCH):
        assert found[f"fraction of the signal bound, {name}"].value > 0
    assert found["stages whose peak of stashes was not the predicted one"].ok


def test_skip_connections_of_a_model_are_timed_too() -> None:
    case = measured.model_case("u-transformer-small", 1.0, paced=True, goals={}, num_microbatches=4)
    assert len(case.graph.edges) == 3
    seconds = measured.ablation_of(case, 1)
    assert list(seconds) == [measured.BOUND, "Broadcast", "Overlap", "Eager", "Eager + weight delaying"]
    assert all(value > 0 for value in seconds.values())
