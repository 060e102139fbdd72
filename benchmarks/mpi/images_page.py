"""Turns reports into ``docs/mpi/images-measured.md``: ``python -m benchmarks.mpi.images_page``."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.report import OUT, header_of, verdict_of

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "mpi" / "images-measured.md"
_PARTS = (
    ("mpi_images", "Jobs: `python -m benchmarks.mpi.images`"),
    ("mpi_engine", "One process: `python -m benchmarks.mpi.engine`"),
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
        "A row is the median of its repetitions;",
        "the spread is the largest over the smallest, minus 1. Bounds are measured in turn with what they bound.",
    ]
    for title, report in parts:
        verb = f"{title.partition('`')[2].partition('`')[0]}, python -m benchmarks.mpi.images_page"
        lines += ["", f"## {title}", "", header_of(report, verb, "the median, with its spread")]
        lines += ["", "| case | value | goal | | spread |", "|---|---|---|---|---|"]
        for row in report["rows"]:
            goal, verdict = ("", "") if row["goal"] is None else (f"{row['goal']:g}", verdict_of(row))
            spread = "" if row["spread"] is None else f"{row['spread']:.2f}"
            lines.append(f"| {row['case']} | {row['value']:.3g} {row['unit']} | {goal} | {verdict} | {spread} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
