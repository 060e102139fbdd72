"""The page of figures beside the hosts says what the report says."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.integrations.tables import make_page
from benchmarks.report import Row, at_least

REPORT = {
    "commit": "0" * 40,
    "machine": {"num_cores": 2, "system": "Linux"},
    "versions": {"python": "3.11", "torch": "2.13"},
    "load_before": [0.0, 0.0, 0.0],
    "load": [1.0, 1.0, 1.0],
    "quick": False,
}


def test_the_page_has_a_line_for_every_row_in_its_section() -> None:
    rows = [at_least("sync of 4 MiB to 2 engines: gain", 5.0, "ratio", 2.0), Row("dcp, 48 MiB, save: ours", 0.25, "s")]
    page = make_page({**REPORT, "rows": [asdict(row) for row in rows]})
    first, second = page.split("## Saves and loads")
    assert "| sync of 4 MiB to 2 engines: gain | 5 | 2, reached |" in first
    assert "| dcp, 48 MiB, save: ours | 250 ms |  |" in second
