"""The cases of the testbed benchmark: plans exist for all of them, and ours stays at the bound."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.reshard import netns
from benchmarks.reshard.netns_cases import Case, all_cases
from remesh.resharding import plan_reshard

CASES = all_cases(1 << 20, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_our_plan_of_a_case_is_at_its_bound(case: Case) -> None:
    assert plan_reshard(case.moves, case.host_of).certified_ratio <= 1.01


def test_bounds_are_those_of_the_fact_sheet() -> None:
    """As shares of the tensor, one device per host where that does not matter."""
    expected = {
        **{f"F5 1 -> ({hosts},{devices})": 1.0 for hosts, devices in ((1, 1), (1, 2), (2, 2), (3, 2), (4, 2))},
        **{f"F6-{number}": 0.5 for number in (1, 2, 3, 4, 5, 6, 9)},
        "F6-7": 1.0,
        "N1": 1 / 2,
        "N2": 2 / 3,
        "N5": 1 / 3,
    }
    for case in CASES:
        name = case.name.split(":")[0]
        if name in expected:
            bound = plan_reshard(case.moves, case.host_of).lower_bound_bytes / case.moves[0].src.nbytes
            assert bound == pytest.approx(expected[name], rel=0.01), name


def test_what_stays_on_its_host_crosses_no_link() -> None:
    (case,) = [case for case in CASES if case.name.startswith("N5")]
    plan = plan_reshard(case.moves, case.host_of)
    assert sum(plan.bytes_by_pair.values()) == case.moves[0].src.nbytes // 3
    assert plan.bytes_copied == case.moves[0].src.nbytes * 2 // 3


def test_without_root_or_tools_the_benchmark_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert netns.why_not() == "needs tc, not on the path"
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert netns.why_not() == "needs root, for network namespaces"
