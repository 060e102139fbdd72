"""Turns the room's report into ``docs/reshard/measured.md``: ``python -m benchmarks.reshard.tables``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import OUT
from benchmarks.reshard.netns import OURS, RATE

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reshard" / "measured.md"
_NICS = ": bytes over NICs, counted over planned"
_NO_VERDICT = ": no verdict"


def main() -> None:
    _PAGE.write_text(make_page(json.loads((OUT / "reshard.json").read_text())))


def make_page(report: Mapping[str, Any]) -> str:
    """The page as text."""
    rows: Sequence[Mapping[str, Any]] = report["rows"]
    load = ", ".join(f"{value:.1f}" for value in report["load"])
    lines = [
        "# Measured",
        "",
        "Written by `python -m benchmarks.reshard.tables` from the report of `make bench ROOM=reshard`; do not edit.",
        f"Machine: {report['machine']['num_cores']} cores, load averages at the end {load}; links of {RATE},",
        "tensors of 16 MiB, two devices on a host where the paper has four.",
        "",
        "## On shaped links",
        "",
        "Each value is the time of a move over that of a plain send and receive of the bound's bytes between two idle",
        "hosts, in the same run: 1 cannot be beaten. Medians of runs that take turns. The last column is what went",
        "over the NICs, by their counters, over what was planned; packets have headers, so 1.05 is none too many.",
        "Contestants that do not stand beside a case were left out of this run.",
        "",
        "| case | remesh | goal | beside it | bytes over NICs |",
        "|---|---|---|---|---|",
    ]
    on_links = [row for row in rows if row["unit"] == "x bound"]
    nics = {row["case"].removesuffix(_NICS): row["value"] for row in rows if row["case"].endswith(_NICS)}
    for row in on_links:
        case, _, name = row["case"].rpartition(", ")
        if name == OURS:
            others = [
                f"{other['peer']} {other['value']:.2f}"
                for other in on_links
                if other["peer"] and other["case"].rpartition(", ")[0] == case
            ]
            goal = "no verdict: busy" if row["goal"] is None else f"{row['goal']:.2f}, {_verdict(row)}"
            told = f"{nics[case]:.3f}" if case in nics else ""
            lines.append(f"| {case} | **{row['value']:.3f}** | {goal} | {', '.join(others)} | {told} |")
    lines += ["", "## Planner and loopback", "", "| what | value | goal |", "|---|---|---|"]
    for row in rows:
        if row in on_links or row["case"].endswith(_NICS) or _NO_VERDICT in row["case"]:
            continue
        goal = "" if row["goal"] is None else f"{row['goal']:g}, {_verdict(row)}"
        lines.append(f"| {row['case']} | {row['value']:.3g} {row['unit']} | {goal} |")
    return "\n".join(lines) + "\n"


def _verdict(row: Mapping[str, Any]) -> str:
    return "reached" if row["ok"] else "**missed**"


if __name__ == "__main__":
    main()
