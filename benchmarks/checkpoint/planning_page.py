"""Turns the report of planning into ``docs/checkpoint/planning.md`` and the plot beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import plot_growth
from benchmarks.report import header_of, verdict_of

_DOCS = Path(__file__).resolve().parents[2] / "docs" / "checkpoint"
_PLOT = "planning.svg"
_CASE = re.compile(r"(\d+) ranks, (\d+) tensors each: (.*)")
_COLUMNS = {
    "planned and validated": "planned and validated",
    "planned and validated, of the processor": "of the processor",
    "of that, validated": "of that, validated",
    "again, with the plan remembered": "again, remembered",
    "index written to bytes": "index to bytes",
    "replicas share the writing, of the processor": "replicas share",
    "writers of plain states, of the processor": "plain states",
}
"""What of a case stands in the table, and under which name."""
_CURVES = (
    "planned and validated, of the processor",
    "again, with the plan remembered",
    "writers of plain states, of the processor",
    "replicas share the writing, of the processor",
)
_LINEAR = "linear in the ranks"

Times = dict[int, dict[str, float]]
"""Seconds by number of ranks and name."""


def write_page(report: Path, folder: Path = _DOCS) -> None:
    """Write the page and the plot of a report."""
    found = json.loads(report.read_text())
    (folder / "planning.md").write_text(make_page(found))
    (folder / _PLOT).write_text(make_plot(times_of(found["rows"])))


def times_of(rows: Sequence[Mapping[str, Any]]) -> Times:
    """The rows that tell seconds of one size of job."""
    times: Times = {}
    for row in rows:
        if (match := _CASE.fullmatch(row["case"])) is not None:
            times.setdefault(int(match[1]), {})[match[3]] = row["value"]
    return times


def make_page(report: Mapping[str, Any]) -> str:
    """The page as text."""
    rows: Sequence[Mapping[str, Any]] = report["rows"]
    times = times_of(rows)
    num_tensors = next(match[2] for row in rows if (match := _CASE.fullmatch(row["case"])))
    lines = [
        "# Planning",
        "",
        header_of(report, "python -m benchmarks.checkpoint.planning", "the least of three"),
        "",
        f"One rank plans with what all others would tell it, {num_tensors} tensors on",
        "each; the network is not in it. Seconds; times of the processor are those of this one process.",
        "",
        f"![Seconds over ranks]({_PLOT})",
        "",
        "| ranks | " + " | ".join(_COLUMNS.values()) + " |",
        "|---" * (len(_COLUMNS) + 1) + "|",
    ]
    for num_ranks, of_size in sorted(times.items()):
        lines.append(f"| {num_ranks} | " + " | ".join(f"{of_size[name]:.2g}" for name in _COLUMNS) + " |")
    lines += ["", "| goal | value | limit | |", "|---|---|---|---|"]
    for row in rows:
        if row["goal"] is not None and " ranks" in row["case"]:
            lines.append(f"| {row['case']} | {row['value']:.2g} {row['unit']} | {row['goal']:g} | {verdict_of(row)} |")
    lines += [
        "",
        "*Planned and validated* is what every rank does the first time it saves a state: it reads the outlines of",
        "all, checks that they fill every tensor exactly once, and, on the first rank, makes the index. *Remembered*",
        "is every save after that. *Replicas share* is the distribution of a data-parallel group of so many ranks",
        "that hold the same; *plain states* is the same for `remesh.save`, where every rank holds another part.",
    ]
    return "\n".join(lines) + "\n"


def make_plot(times: Times) -> str:
    """Seconds over ranks as SVG, with what linear growth would be."""
    sizes = sorted(times)
    curves = {_COLUMNS[name]: {size: times[size][name] for size in sizes} for name in _CURVES}
    curves[_LINEAR] = {size: times[sizes[0]][_CURVES[0]] * size / sizes[0] for size in sizes}
    return plot_growth(curves, "Seconds of planning over the number of ranks", "ranks", unit="s", dashed=(_LINEAR,))
