"""How do rows outlive an interrupted run? Each goes to the room's report as soon as it is there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.report import OUT, Row, print_rows, save_report
from benchmarks.reshard.settings import Settings

_ROOM = "reshard"


class Journal:
    """The rows of a report that is written again with every experiment that ends."""

    def __init__(self, settings: Settings, seed: int, folder: Path = OUT) -> None:
        self._settings = settings
        self._seed = seed
        self._folder = folder
        self._rows: dict[str, dict[str, Any]] = {}
        """By case, in the order in which they came first."""
        path = folder / f"{_ROOM}.json"
        if settings.keeps and path.exists():
            report = json.loads(path.read_text())
            if report.get("links") != settings.links:
                raise ValueError(
                    f"keeping the rows of {path.name}: it has {report.get('links')}, expected {settings.links}; "
                    "measure with the same settings, or keep nothing (KEEP=0)"
                )
            self._rows = {row["case"]: row for row in report["rows"]}

    def add(self, rows: Sequence[Row]) -> None:
        """Print rows and write the report; a row takes the place of the earlier one of its case."""
        print_rows(rows)
        self._rows |= {row.case: asdict(row) for row in rows}
        save_report(_ROOM, list(self._rows.values()), self._seed, self._folder, links=self._settings.links)
