"""Numbers that events add up to, in a text that scrapers can read."""

from __future__ import annotations

import re

from hypothesis import given, strategies as st

from remesh.elasticity.telemetry.metrics import MAX_KINDS, Metrics

_SAMPLE = re.compile(r'^[a-z_]+(\{[a-z]+="(\\.|[^"\\\n])*"\})? -?[0-9.]+$')


def values(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.render().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_replaced_worker_counts_as_a_restart_and_the_end_has_its_category() -> None:
    metrics = Metrics()
    for event in (
        {"kind": "worker-started", "slot": 0, "pid": 10},
        {"kind": "worker-started", "slot": 1, "pid": 11},
        {"kind": "generation", "number": 1, "members": [0, 1]},
        {"kind": "worker-exited", "slot": 1},
        {"kind": "worker-started", "slot": 1, "pid": 12},
        {"kind": "worker-exited", "slot": 0},
        {"kind": "finish", "category": "worker"},
    ):
        metrics.take(event)
    found = values(metrics)
    assert found["remesh_restarts_total"] == 1
    assert found["remesh_workers_running"] == 1
    assert found["remesh_world_size"] == 2
    assert found['remesh_events_total{kind="worker-started"}'] == 3
    assert found['remesh_ended{category="worker"}'] == 1


@given(st.lists(st.text(max_size=8), max_size=20))
def test_every_kind_of_event_makes_a_valid_exposition(kinds: list[str]) -> None:
    metrics = Metrics()
    known = {"generation", "round", "worker-started", "worker-exited", "finish"}
    for kind in kinds:
        if kind not in known:
            metrics.take({"kind": kind})
    lines = metrics.render().split("\n")
    assert lines[-2:] == ["# EOF", ""]
    assert all(_SAMPLE.match(line) for line in lines[:-2] if not line.startswith("# "))


def test_kinds_without_end_do_not_fill_the_memory() -> None:
    metrics = Metrics()
    for number in range(10 * MAX_KINDS):
        metrics.take({"kind": f"kind-{number}"})
    assert sum("remesh_events_total" in line for line in metrics.render().splitlines()) <= MAX_KINDS + 1
    assert values(metrics)['remesh_events_total{kind="other"}'] == 9 * MAX_KINDS
