"""The page of measured moves says what the report says, misses included."""

from __future__ import annotations

from typing import Any

from benchmarks.reshard.tables import make_page
from tests.unit.benchmarks.described import DESCRIBED


def row(case: str, value: float, unit: str, **more: Any) -> dict[str, Any]:
    return {"case": case, "value": value, "unit": unit, "goal": None, "ok": None, "peer": None} | more


def test_goals_peers_and_counters_stand_in_the_row_of_their_case() -> None:
    rows = [
        row("plan of x", 0.5, "s", goal=0.05, ok=False),
        row("F5 1 -> (2,2), remesh", 1.01, "x bound", goal=1.03, ok=True),
        row("F5 1 -> (2,2), gloo broadcast", 2.0, "x bound", peer="gloo broadcast"),
        row("F6-1: S -> R, remesh", 1.01, "x bound", goal=1.05, ok=True),
        row("F6-1: S -> R, alpa", 1.5, "x bound", peer="alpa"),
        row("N1: a, b, remesh", 1.02, "x bound", goal=1.04, ok=True),
        row("N1: a, b, naive", 2.0, "x bound", peer="naive"),
        row("N1: a, b: bytes over NICs, counted over planned", 1.046, "ratio", goal=1.07, ok=True),
        row("N1: a, b: t", 0.701, "s"),
        row("N1: a, b: load", 1.25, "load"),
        row("N2, remesh", 1.3, "x bound", goal=1.06, ok=False),
        row("N3, remesh", 1.2, "x bound"),
        row("rows to columns", 2.7, "ratio", goal=2.0, ok=False, bound=2.5),
        row("N3: no verdict, t varied by 9.0%, load 7.0", 0.09, "spread"),
    ]
    links = "16 MiB over 100 Mbit/s, 2 devices"
    page = make_page({**DESCRIBED, "rows": rows, "links": links})
    assert links in page
    assert "| F5 1 -> (2,2) | **1.010** | 1.03, reached |  |  |  |  | 2.00 |  |  |  |" in page
    assert "| F6-1: S -> R | **1.010** | 1.05, reached |  |  |  |  |  | 1.50 |  |  |  |" in page
    assert "| N1: a, b | **1.020** | 1.04, reached | naive 2.00 | 0.70 s | 1.046 | 1.2 |" in page
    assert "| N2 | **1.300** | 1.06, **missed** |  |  |  |  |" in page
    assert "| N3 | **1.200** | no verdict: busy |  |  |  |  |" in page
    assert "| plan of x | 0.5 s |  | 0.05, **missed** |" in page
    assert "| rows to columns | 2.7 ratio | 2.5 | 2, **missed**; its bound lies above it |" in page
    assert page.count("t varied") == 0 and page.count("N1: a, b") == 1
