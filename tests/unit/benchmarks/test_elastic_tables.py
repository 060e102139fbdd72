"""The page of measured recoveries says what the report says, misses included; a small control plane runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.elastic import control_plane
from benchmarks.elastic.phases import PHASES, split_recovery
from benchmarks.elastic.tables import draw_plane, make_page


def row(case: str, value: float, unit: str, **more: Any) -> dict[str, Any]:
    return {"case": case, "value": value, "unit": unit, "goal": None, "ok": None, "peer": None} | more


def page_of(rows: list[dict[str, Any]]) -> str:
    return make_page({"rows": rows, "load": [0.5, 0.4, 0.3], "machine": {"num_cores": 2}, "quick": False})


def test_a_recovery_stands_beside_torchruns_with_its_phases() -> None:
    rows = [
        row("one node killed: torchrun over remesh, p50", 41.2, "ratio", goal=20.0, ok=True),
        row("one node killed: remesh, kill to next step, p50", 0.1, "s"),
        row("one node killed: torchrun, kill to next step, p50", 4.12, "s"),
        *(row(f"one node killed: remesh, {phase}, p50", 0.01, "s") for phase in PHASES),
        row("snapshots", 0.05, "ratio", goal=0.03, ok=False),
    ]
    page = page_of(rows)
    assert "| one node killed, p50 | 0.100 | 4.12 | **41.2** | 20, reached |" in page
    assert "| one node killed, p50 | 10 | 10 | 10 | 10 | 10 | 10 |" in page
    assert "| snapshots | 0.05 ratio | 0.03, **missed** |" in page


def test_phases_end_where_the_last_survivor_gets_there_and_add_up() -> None:
    def event(kind: str, who: str, t: float, generation: int) -> dict[str, Any]:
        return {"kind": kind, "who": who, "t": t, "number" if kind == "generation" else "generation": generation}

    told = [event("left", who, t, 6) for who, t in (("w1", 0.02), ("w2", 0.03))]
    told += [event("meeting", "a", 0.025, 7), event("generation", "a", 0.05, 7)]
    told += [event(kind, who, t, 7) for kind, t in (("grown", 0.06), ("filled", 0.08), ("step", 0.1)) for who in "xy"]
    phases = split_recovery(told, killed_s=0.0, generation=7, num_survivors=2)
    assert phases == pytest.approx(
        {"noticed": 0.03, "met": 0.0, "planned": 0.02, "rebuilt": 0.01, "moved": 0.02, "first step": 0.02}
    )
    assert sum(phases.values()) == pytest.approx(0.1)


def test_messages_of_an_event_grow_like_the_agents_and_no_faster() -> None:
    small, large = (control_plane.measure(size)[0] for size in (16, 64))
    for before, after in zip(small, large, strict=True):
        assert after.event == before.event
        assert after.messages / 64 < 1.25 * before.messages / 16, after.event


def test_the_picture_and_the_table_have_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "QUICK_SIZES", (16, 64))
    rows = [asdict(one) for one in control_plane.rows(quick=True)]
    page, picture = page_of(rows), draw_plane(rows)
    assert page.count("| node joins | ") == 2
    assert picture.count("<polyline") == 6 and "node joins" in picture
