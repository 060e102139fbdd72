"""Turns the room's report into ``docs/elastic/measured.md`` and a picture: ``python -m benchmarks.elastic.tables``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.elastic.phases import PHASES
from benchmarks.plots import plot_growth
from benchmarks.report import OUT, verdict_of

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "elastic"
PICTURE = "control-plane.svg"
_PLANE = re.compile(r"control plane, (\d+) agents, (.+): (.+)")
_TURNS = "an agent's turns"
_SIDES = ("remesh", "torchrun")
_CASES = ("one worker killed", "one node killed")
Row = Mapping[str, Any]


def main() -> None:
    report = json.loads((OUT / "elastic.json").read_text())
    (FOLDER / "measured.md").write_text(make_page(report))
    (FOLDER / PICTURE).write_text(draw_plane(report["rows"]))


def make_page(report: Mapping[str, Any]) -> str:
    """The page as text; parts that were not run are left out."""
    rows: Sequence[Row] = report["rows"]
    load = ", ".join(f"{value:.1f}" for value in report["load"])
    recovery, others, plane = _recoveries(rows), _others(rows), _plane(rows)
    parts = {"recoveries": recovery, "costs and moves": others, "the control plane": plane}
    missing = [name for name, part in parts.items() if not part]
    lines = [
        "# Measured",
        "",
        "Written by `python -m benchmarks.elastic.tables` from the report of `make bench ROOM=elastic`; do not edit.",
        f"Machine: {report['machine']['num_cores']} cores, load averages at the end {load}"
        + ("; the small set of `QUICK=1`." if report["quick"] else "."),
        *([f"Not run this time: {', '.join(missing)}."] if missing else []),
    ]
    return "\n".join([*lines, *recovery, *others, *plane]) + "\n"


def _recoveries(rows: Sequence[Row]) -> list[str]:
    """The part about kills."""
    at = {row["case"]: row for row in rows}
    beside, split = [], []
    for case in _CASES:
        for name in ("p50", "p95"):
            if (ratio := at.get(f"{case}: torchrun over remesh, {name}")) is None:
                continue
            ours, theirs = (at[f"{case}: {side}, kill to next step, {name}"]["value"] for side in _SIDES)
            beside.append(f"| {case}, {name} | {ours:.3f} | {theirs:.2f} | **{ratio['value']:.1f}** | {_goal(ratio)} |")
            shown = " | ".join(f"{at[f'{case}: remesh, {phase}, {name}']['value'] * 1e3:.0f}" for phase in PHASES)
            split.append(f"| {case}, {name} | {shown} |")
    if not beside:
        return []
    return [
        "",
        "## Recovery",
        "",
        "From the SIGKILL to the next step of all that go on; two nodes of two workers, steps of 50 ms, the same",
        "training and checkpoint interval, in turn. torchrun with the settings that make it fastest.",
        "",
        "| case | remesh, s | torchrun, s | torchrun over remesh | goal |",
        "|---|---|---|---|---|",
        *beside,
        "",
        "Where the time goes, in milliseconds:",
        "",
        f"| case | {' | '.join(PHASES)} |",
        "|---|" + "---|" * len(PHASES),
        *split,
    ]


def _others(rows: Sequence[Row]) -> list[str]:
    """The part about all that has no table of its own."""
    in_tables = {f"{case}: torchrun over remesh, {name}" for case in _CASES for name in ("p50", "p95")}
    in_tables |= {f"{c}: {s}, kill to next step, {n}" for c in _CASES for s in _SIDES for n in ("p50", "p95")}
    in_tables |= {f"{case}: remesh, {phase}, {name}" for case in _CASES for phase in PHASES for name in ("p50", "p95")}
    found = [
        f"| {row['case']} | {row['value']:.4g} {row['unit']} | {_goal(row)} |"
        for row in rows
        if row["case"] not in in_tables and not row["case"].startswith("control plane")
    ]
    title = ["", "## Costs, losses, moves on shaped links", "", "| what | value | goal |", "|---|---|---|"]
    return [*title, *found] if found else []


def _plane(rows: Sequence[Row]) -> list[str]:
    """The part about large jobs."""
    if not any(_PLANE.fullmatch(row["case"]) for row in rows):
        return []
    lines = [
        "",
        "## Control plane",
        "",
        "The agents' own machines, one worker each, in one thread over a store that counts; an event runs until every",
        "agent is in the generation that follows. Messages are reads and writes of the store, messages to and from",
        "workers, and connections, for each agent. A vote costs agents nothing: it is an all-reduce of the workers.",
        "",
        f"![messages of an event over the number of agents]({PICTURE})",
        "",
        "| event | agents | messages per agent | stored bytes per agent | decision, ms | an agent's turns, ms |",
        "|---|---|---|---|---|---|",
    ]
    cells: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if match := _PLANE.fullmatch(row["case"]):
            cells.setdefault((match[2], int(match[1])), {})[match[3]] = row["value"]
    for (event, size), values in sorted(cells.items()):
        if "messages per agent" in values:
            lines.append(
                f"| {event} | {size} | {values['messages per agent']:.1f} | {values['stored bytes per agent']:.0f} | "
                f"{values['decision'] * 1e3:.2f} | {values[_TURNS] * 1e3:.2f} |"
            )
    lines += [
        "",
        "Stored bytes grow with the job because a plan names every member and every agent reads it.",
        "",
        "| growth, as a power of the number of agents | value | goal |",
        "|---|---|---|",
    ]
    for row in rows:
        if row["unit"] == "exponent":
            about = row["case"].removeprefix("control plane, ")
            lines.append(f"| {about} | {row['value']:.2f} | {_goal(row)} |")
    lines += ["", "| for each agent | value |", "|---|---|"]
    for row in rows:
        if row["case"].startswith("control plane") and _PLANE.fullmatch(row["case"]) is None and row["goal"] is None:
            lines.append(f"| {row['case'].removeprefix('control plane, ')} | {row['value']:.4g} {row['unit']} |")
    return lines


def draw_plane(rows: Sequence[Row]) -> str:
    """All messages of an event over the number of agents."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        match = _PLANE.fullmatch(row["case"])
        if match and match[3] == "messages per agent":
            curves.setdefault(match[2], {})[int(match[1])] = row["value"] * int(match[1])
    return plot_growth(dict(sorted(curves.items())), "Messages of an event", "agents")


def _goal(row: Row) -> str:
    if row["goal"] is None:
        return ""
    return f"{row['goal']:g}, {verdict_of(row)}"


if __name__ == "__main__":
    main()
