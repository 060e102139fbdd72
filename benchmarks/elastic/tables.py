"""Turns the room's report into ``docs/elastic/measured.md`` and a picture: ``python -m benchmarks.elastic.tables``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.elastic import launcher_start
from benchmarks.elastic.attempts import LAUNCHERS, MAX_RESTARTS, MEETINGS, QUIET_S
from benchmarks.elastic.phases import PHASES
from benchmarks.plots import plot_growth
from benchmarks.report import OUT, describe_value, header_of, verdict_of

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "elastic"
PICTURE = "control-plane.svg"
_PLANE = re.compile(r"control plane, (\d+) agents, (.+): (.+)")
_RESTARTS = "restart mode, "
_TURNS = "an agent's turns"
_SIDES = ("remesh", "torchrun", "torchft", "nvrx")
_CASES = ("one worker killed", "one node killed", "node with the rendezvous killed")
_SHARES = ("p50", "p95")
_ABOUT_PEERS = {
    "torchrun": "torchrun, with the settings that make it fastest, restarts all workers from the checkpoint.",
    "torchft": "torchft {}: each worker is a replica; its lighthouse, which is not killed, waits 0.2 s for late "
    "replicas. It counts steps; the program must know which samples a dead replica had. The lighthouse is one process: "
    "if its host dies, no step is agreed on any more, so that case has no row.",
    "nvrx": "nvrx is nvidia-resiliency-ext {}: its in-process wrapper calls the training function again, which starts "
    "from the checkpoint; a dead rank is not replaced, so every kill has a new job. Its store is in the first rank: "
    "if that rank's host dies, the others cannot meet, so that case has no row.",
}
_COLUMNS = (
    *("case", "program", "kills", "did not come back", "p50, s", "p95, s", "p50 over remesh", "p95 over remesh"),
    "steps lost",
)
Row = Mapping[str, Any]


def main() -> None:
    report = json.loads((OUT / "elastic.json").read_text())
    if restarts := make_restarts_page(report):
        (FOLDER / "restarts.md").write_text(restarts)
    if any(not row["case"].startswith(_RESTARTS) for row in report["rows"]):
        (FOLDER / "measured.md").write_text(make_page(report))
        (FOLDER / PICTURE).write_text(draw_plane(report["rows"]))


_VERB = "make bench ROOM=elastic && python -m benchmarks.elastic.tables"


def make_page(report: Mapping[str, Any]) -> str:
    """The page as text; parts that were not run are left out."""
    rows: Sequence[Row] = report["rows"]
    versions: Mapping[str, str] = report.get("peers", {})
    recovery, others, plane = _recoveries(rows, versions), _others(rows), _plane(rows)
    parts = {"recoveries": recovery, "costs and moves": others, "the control plane": plane}
    missing = [name for name, part in parts.items() if not part]
    missing += [name for name in _SIDES if recovery and _kills_of(rows, _CASES[0], name) is None]
    lines = [
        "# Measured",
        "",
        header_of(report, _VERB, "as many as the column of kills says; elsewhere the median of several"),
        *([f"Not run this time: {', '.join(missing)}."] if missing else []),
    ]
    return "\n".join([*lines, *recovery, *others, *plane]) + "\n"


def _recoveries(rows: Sequence[Row], versions: Mapping[str, str]) -> list[str]:
    """The part about kills."""
    at = {row["case"]: row for row in rows}
    beside = [line for case in _CASES for side in _SIDES if (line := _side_line(rows, case, side))]
    split = []
    for case in _CASES:
        for name in _SHARES:
            times = [at.get(f"{case}: remesh, {phase}, {name}") for phase in PHASES]
            if None not in times:
                shown = " | ".join(f"{time['value'] * 1e3:.0f}" for time in times if time is not None)
                split.append(f"| {case}, {name} | {shown} |")
    if not beside:
        return []
    told = [side for side in _ABOUT_PEERS if any(f"| {side} |" in line for line in beside)]
    return [
        "",
        "## Recovery",
        "",
        "From the SIGKILL to the next step of all that go on; four workers, on two nodes under remesh and torchrun,",
        "steps of 50 ms, the same training and checkpoint interval, in turn. A job that takes no step within 30 s of a",
        "kill, or is not complete 90 s later, did not come back.",
        "",
        *(f"- {_ABOUT_PEERS[side].format(versions.get(side, ''))}" for side in told),
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---" * len(_COLUMNS) + "|",
        *beside,
        "",
        "Where our time goes, in milliseconds:",
        "",
        f"| case | {' | '.join(PHASES)} |",
        "|---|" + "---|" * len(PHASES),
        *split,
    ]


def _kills_of(rows: Sequence[Row], case: str, side: str) -> Row | None:
    return next((row for row in rows if row["case"] == f"{case}: {side}, kills"), None)


def _side_line(rows: Sequence[Row], case: str, side: str) -> str | None:
    """One program in one case; None when it was not run."""
    at = {row["case"]: row for row in rows}
    if (kills := _kills_of(rows, case, side)) is None:
        return None
    cells = [f"{kills['value']:.0f}", _cell(at.get(f"{case}: {side}, jobs that did not come back"), "{:.0f}")]
    cells += [_cell(at.get(f"{case}: {side}, kill to next step, {name}"), "{:.3f}") for name in _SHARES]
    cells += [_cell(at.get(f"{case}: {side} over remesh, {name}"), "**{:.1f}**") for name in _SHARES]
    cells.append(_cell(at.get(f"{case}: {side}, steps lost"), "{:.0f}"))
    return f"| {case} | {side} | {' | '.join(cells)} |"


def _cell(row: Row | None, form: str) -> str:
    if row is None:
        return ""
    goal = _goal(row)
    return form.format(row["value"]) + (f" ({goal})" if goal else "")


def make_restarts_page(report: Mapping[str, Any]) -> str:
    """The page about plain scripts; empty where they were not run."""
    at = {row["case"]: row for row in report["rows"]}
    lines = []
    for meeting in MEETINGS:
        for launcher in LAUNCHERS:
            about = f"{_RESTARTS}{meeting}: {launcher}"
            if (kills := at.get(f"{about}, kills")) is None:
                continue
            cells = [f"{kills['value']:.0f}", _cell(at[f"{about}, back at the first attempt"], "{:.0f}")]
            cells += [_cell(at[f"{about}, {what}"], "{:.0f}") for what in ("never back", "attempts wasted")]
            cells.append(_cell(at.get(f"{about}, kill to through, p50"), "{:.1f}"))
            lines.append(f"| {meeting} | {launcher} | {' | '.join(cells)} |")
    title = [
        "# Restart mode, measured",
        "",
        header_of(report, f"PARTS=attempts KEEP=1 {_VERB}", "as many as the column of kills says; the median"),
        "",
        "A plain script makes a gloo group of two ranks and adds numbers up; in its first attempt rank 1 is killed.",
        f"{MAX_RESTARTS} restarts are allowed. Both launchers have the same flags and run in turn; two nodes, but for",
        "`standalone`. The time is from the kill to the end of the script on both ranks. torchrun has as many kills",
        "as it comes to in its time (`PEER_MINUTES`): a job that hangs is given up after no rank has got anywhere for",
        f"{QUIET_S:.0f} s.",
        "",
        "| meeting place | launcher | kills | back at the first attempt | never back | attempts wasted | p50, s |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*title, *lines, *_starts(at)]) + "\n" if lines else ""


def _starts(at: Mapping[str, Row]) -> list[str]:
    """The part about what a start costs."""
    shown = []
    for start in launcher_start.STARTS:
        about = f"{launcher_start.ABOUT}, {start}"
        if (ratio := at.get(f"{about}: remesh over torchrun")) is None:
            continue
        times = [at[f"{about}: {launcher}, processor time"]["value"] for launcher in LAUNCHERS]
        shown.append(f"| {start} | {' | '.join(f'{time:.2f}' for time in times)} | {_cell(ratio, '{:.2f}')} |")
    title = [
        "",
        "## What a start costs",
        "",
        "Processor time of the launcher and all its processes, `--standalone` with two workers, both launchers in",
        "turn; the median of five. Under both, each worker loads what its script imports.",
        "",
        f"| start | {', s | '.join(LAUNCHERS)}, s | remesh over torchrun |",
        "|---|---|---|---|",
    ]
    return [*title, *shown] if shown else []


def _is_in_tables(case: str) -> bool:
    """Whether a row about kills has its cell in a table of its own."""
    return case.partition(": ")[0] in _CASES or case.startswith(_RESTARTS)


def _others(rows: Sequence[Row]) -> list[str]:
    """The part about all that has no table of its own."""
    found = [
        f"| {row['case']} | {describe_value(row['value'], row['unit'])} | {_goal(row)} |"
        for row in rows
        if not _is_in_tables(row["case"]) and not row["case"].startswith("control plane")
    ]
    title = ["", "## Costs and moves on shaped links", "", "| what | value | goal |", "|---|---|---|"]
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
            value = describe_value(row["value"], row["unit"])
            lines.append(f"| {row['case'].removeprefix('control plane, ')} | {value} |")
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
