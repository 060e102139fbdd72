"""Turns reports into ``docs/mpi/images-measured.md``: ``python -m benchmarks.mpi.images_page``."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.report import OUT, verdict_of

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "mpi" / "images-measured.md"
_PARTS = (
    ("mpi_images", "Jobs: `python -m benchmarks.mpi.images`"),
    ("mpi_engine", "One process: `python -m benchmarks.mpi.engine`, with CRIU on the PATH"),
)


def main() -> None:
    """Write the page from the reports that are there."""
    paths = [(OUT / f"{name}.json", title) for name, title in _PARTS]
    parts = [(title, json.loads(path.read_text())) for path, title in paths if path.exists()]
    if not parts:
        raise SystemExit(f"writing {_PAGE.name}: no report in {OUT}; run the benchmarks first")
    _PAGE.write_text(make_page(parts))


def make_page(parts: list[tuple[str, dict]]) -> str:
    """The page as text; each part is a title and a report."""
    lines = [
        "# What images cost, as measured",
        "",
        "Made by `python -m benchmarks.mpi.images_page`; do not edit. A row is the median of its repetitions;",
        "the spread is the largest over the smallest, minus 1. Bounds are measured in turn with what they bound.",
    ]
    for title, report in parts:
        cores, load, system = report["machine"]["num_cores"], report["load"][0], report["machine"]["system"]
        commit = (report["commit"] or "unknown")[:12]
        lines += ["", f"## {title}", "", f"Machine: {cores} cores, load {load:.1f}, {system}; commit {commit}."]
        lines += ["", "| case | value | goal | | spread |", "|---|---|---|---|---|"]
        for row in report["rows"]:
            goal, verdict = ("", "") if row["goal"] is None else (f"{row['goal']:g}", verdict_of(row))
            spread = "" if row["spread"] is None else f"{row['spread']:.2f}"
            lines.append(f"| {row['case']} | {row['value']:.3g} {row['unit']} | {goal} | {verdict} | {spread} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
