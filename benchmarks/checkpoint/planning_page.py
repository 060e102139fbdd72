"""Turns the report of planning into ``docs/dist_checkpointing/planning.md`` and the plot beside it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).resolve().parents[2] / "docs" / "dist_checkpointing"
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
_CURVES = {
    "planned and validated, of the processor": "#1f6feb",
    "again, with the plan remembered": "#2da44e",
    "writers of plain states, of the processor": "#bf8700",
    "replicas share the writing, of the processor": "#8250df",
}
_WIDTH, _HEIGHT, _LEFT, _TOP, _INNER_W, _INNER_H = 640, 360, 70, 20, 370, 290

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
    load = ", ".join(f"{value:.1f}" for value in report["load"])
    lines = [
        "# Planning",
        "",
        "Written by `python -m benchmarks.checkpoint.planning`; do not edit. "
        f"Machine: {report['machine']['num_cores']} cores,",
        f"load averages at the end {load}. One rank plans with what all others would tell it, {num_tensors} tensors on",
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
        if row["goal"] is not None:
            verdict = "reached" if row["ok"] else "**missed**"
            lines.append(f"| {row['case']} | {row['value']:.2g} {row['unit']} | {row['goal']:g} | {verdict} |")
    lines += [
        "",
        "*Planned and validated* is what every rank does the first time it saves a state: it reads the outlines of",
        "all, checks that they fill every tensor exactly once, and, on the first rank, makes the index. *Remembered*",
        "is every save after that. *Replicas share* is the distribution of a data-parallel group of so many ranks",
        "that hold the same; *plain states* is the same for `remesh.save`, where every rank holds another part.",
    ]
    return "\n".join(lines) + "\n"


def make_plot(times: Times) -> str:
    """Seconds over ranks, both in powers of their own, as SVG."""
    sizes = sorted(times)
    values = [times[size][name] for size in sizes for name in _CURVES]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x_of(size: int) -> float:
        share = math.log2(size / sizes[0]) / max(math.log2(sizes[-1] / sizes[0]), 1)
        return _LEFT + share * _INNER_W

    def y_of(seconds: float) -> float:
        return _TOP + (high - math.log10(seconds)) / (high - low) * _INNER_H

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="11" role="img">',
        "<title>Seconds of planning over the number of ranks</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for power in range(low, high + 1):
        y = y_of(10.0**power)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _INNER_W}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>')
    for size in sizes:
        parts.append(f'<text x="{x_of(size):.1f}" y="{_TOP + _INNER_H + 18}" text-anchor="middle">{size}</text>')
    parts.append(f'<text x="{_LEFT + _INNER_W / 2}" y="{_HEIGHT - 12}" text-anchor="middle">ranks</text>')
    for number, (name, colour) in enumerate(_CURVES.items()):
        points = " ".join(f"{x_of(size):.1f},{y_of(times[size][name]):.1f}" for size in sizes)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = _TOP + 14 + 18 * number
        parts.append(f'<text x="{_LEFT + _INNER_W + 14}" y="{y}" fill="{colour}">{_COLUMNS[name]}</text>')
    first = "planned and validated, of the processor"
    linear = [times[sizes[0]][first] * size / sizes[0] for size in sizes]
    points = " ".join(f"{x_of(size):.1f},{y_of(value):.1f}" for size, value in zip(sizes, linear, strict=True))
    parts.append(f'<polyline points="{points}" fill="none" stroke="#1f6feb" stroke-dasharray="4 4"/>')
    y = _TOP + 14 + 18 * len(_CURVES)
    parts.append(f'<text x="{_LEFT + _INNER_W + 14}" y="{y}" fill="#1f6feb">dashed: linear in the ranks</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
