"""Turns the room's report into ``docs/integrations/measured.md``: ``python -m benchmarks.integrations.tables``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.integrations.sync import __doc__ as _ABOUT_SYNC
from benchmarks.report import OUT, describe_value, header_of, verdict_of

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations" / "measured.md"
_VERB = "make bench ROOM=integrations && .hosts/bin/python -m benchmarks.integrations.tables"
_ABOUT_SAVES = (
    "Each run is a job of its own under torchrun: a model and its AdamW, under FSDP2 (DCP, Lightning) or DDP "
    "(Accelerate), saved by two ranks, loaded by two and by three, three times in a row (Lightning loads once). Of 48 "
    "MiB (`QUICK=1`) there is one job of each kind, of 96 MiB two in turn. The files are in the page cache when "
    "they are loaded. Blocked is the time until `dcp.async_save` returns; `save_checkpoint` and `save_state` block "
    "until all is written. Ours writes checksums and compares them; the hosts have none. "
    "Accelerate does not wait until its files are on the disk, where the others and ours do; one row has it wait, too."
)


def main() -> None:
    _PAGE.write_text(make_page(json.loads((OUT / "integrations.json").read_text())))


def make_page(report: Mapping[str, Any]) -> str:
    """The page as text."""
    assert _ABOUT_SYNC is not None
    runs = "host and ours in turn; the median"
    lines = ["# Measured", "", header_of(report, _VERB, runs)]
    sections = (
        ("Weights from a trainer into engines", _ABOUT_SYNC.strip(), True),
        ("Saves and loads", _ABOUT_SAVES, False),
    )
    for title, about, is_sync in sections:
        rows = [row for row in report["rows"] if row["case"].startswith("sync of") == is_sync]
        if rows:
            lines += [
                "",
                f"## {title}",
                "",
                about,
                "",
                "| case | value | goal |",
                "|---|---|---|",
                *map(_line_of, rows),
            ]
    return "\n".join(lines) + "\n"


def _line_of(row: Mapping[str, Any]) -> str:
    goal = "no verdict: busy" if row["bound"] and row["goal"] is None else ""
    goal = goal if row["goal"] is None else f"{row['goal']:g}, {verdict_of(row)}"
    return f"| {row['case']} | {describe_value(row['value'], row['unit'])} | {goal} |"


if __name__ == "__main__":
    main()
