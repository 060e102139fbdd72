"""The page of measured moves says what the report says, misses included."""

from __future__ import annotations

from typing import Any

from benchmarks.reshard.tables import make_page


def row(case: str, value: float, unit: str, **more: Any) -> dict[str, Any]:
    return {"case": case, "value": value, "unit": unit, "goal": None, "ok": None, "peer": None} | more


def test_goals_peers_and_counters_stand_in_the_row_of_their_case() -> None:
    rows = [
        row("plan of x", 0.5, "s", goal=0.05, ok=False),
        row("N1: a, b, remesh", 1.02, "x bound", goal=1.04, ok=True),
        row("N1: a, b, naive", 2.0, "x bound", peer="naive"),
        row("N1: a, b: bytes over NICs, counted over planned", 1.046, "ratio", goal=1.07, ok=True),
        row("N2, remesh", 1.3, "x bound", goal=1.06, ok=False),
        row("N3, remesh", 1.2, "x bound"),
        row("N3: no verdict, t varied by 9.0%, load 7.0", 0.09, "spread"),
    ]
    page = make_page({"rows": rows, "load": [0.5, 0.4, 0.3], "machine": {"num_cores": 2}})
    assert "| N1: a, b | **1.020** | 1.04, reached | naive 2.00 | 1.046 |" in page
    assert "| N2 | **1.300** | 1.06, **missed** |  |  |" in page
    assert "| N3 | **1.200** | no verdict: busy |  |  |" in page
    assert "| plan of x | 0.5 s | 0.05, **missed** |" in page
    assert page.count("t varied") == 0
