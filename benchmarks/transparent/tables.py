"""Turns the matrix's results into ``docs/transparent/matrix.md``: ``python -m benchmarks.transparent.tables``."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.report import OUT
from benchmarks.transparent.chain import ALL

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "transparent" / "matrix.md"
_SIGNS = {True: "=", False: "**x**", None: "·"}


def main() -> None:
    pairs = json.loads((OUT / "transparent_pairs.json").read_text())
    report = json.loads((OUT / "transparent_matrix.json").read_text())
    _PAGE.write_text(make_page(pairs, report))


def make_page(pairs: dict, report: dict) -> str:
    """The page as text."""
    seen = pairs["pairs"]
    cores, load, system = report["machine"]["num_cores"], report["load"][0], report["machine"]["system"]
    good = sum(seen.values())
    lines = [
        "# The matrix",
        "",
        "Made by `python -m benchmarks.transparent.matrix` and `.tables`; do not edit. Each cell is a job of 4 ranks",
        "that was stopped in the row's configuration and restarted in the column's: `=` its job gave the",
        "answer of an uninterrupted run on a real MPI, `x` it did not, `·` not run. A job has 17 restarts, at moments",
        "drawn by chance.",
        "",
        f"{good} of {len(ALL) * (len(ALL) - 1)} ordered pairs are `=`, {len(seen) - good} are `x`.",
        f"Machine: {cores} cores, load {load:.0f}, {system}; Python {report['versions']['python']}.",
        "",
        "| | configuration | " + " | ".join(str(number) for number in range(1, len(ALL) + 1)) + " |",
        "|---|---|" + "---|" * len(ALL),
    ]
    for number, before in enumerate(ALL, 1):
        cells = ["" if before == after else _SIGNS[seen.get(f"{before} -> {after}")] for after in ALL]
        lines.append(f"| {number} | {before} | " + " | ".join(cells) + " |")
    lines += ["", "| over all its checkpoints | value | goal |", "|---|---|---|"]
    for row in report["rows"]:
        goal = "" if row["goal"] is None else f"{row['goal']:g}"
        lines.append(f"| {row['case']} | {row['value']:.4g} {row['unit']} | {goal} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
