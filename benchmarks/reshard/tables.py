"""Turns the room's report into ``docs/reshard/measured.md``: ``python -m benchmarks.reshard.tables``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import OUT, header_of, verdict_of
from benchmarks.reshard.netns import OURS
from benchmarks.reshard.netns_cases import GLOO, ORDERS, WAYS

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reshard" / "measured.md"
_ASIDES = {": t": "t", ": load": "load", ": bytes over NICs, counted over planned": "nics"}
"""Ends of the names of rows that belong to a case, and their columns."""
_NO_VERDICT = ": no verdict"
_ON_LINKS = "x bound"

_ABOUT = """\
Each value is the time of a move over that of a plain send and receive of the bound's bytes between two idle hosts, in
the same run: 1 cannot be beaten. Medians of runs that take turns; plans are made before. `t` is the time of that plain
message; *bytes* is what went over the NICs, by their counters, over what was planned: packets have headers, so 1.05 is
none too many; *load* is the machine's, the ranks themselves included. Contestants without a value did not run."""

_FIG_5 = """\
One device sends the whole tensor to meshes of (hosts, devices), by every way of the paper, and by the backend's own
broadcast."""

_FIG_8 = """\
The published cases with every choice of senders and order: the ablation of Fig. 8. [Simulated](ablation.md), with a
thousand random pairs."""

_BEYOND = """\
What sender choice and order of whole slices cannot do, or cannot do at the bound."""

_LOOPBACK = """\
Over loopback every byte passes through the processor, so packing shows. Where a row has a bound, that is the same move
written by hand for its two layouts, in turn with it: what lies apart in memory is packed first, and no run can be
faster."""


def main() -> None:
    _PAGE.write_text(make_page(json.loads((OUT / "reshard.json").read_text())))


@dataclass(frozen=True, slots=True)
class _Table:
    """Cases that are compared with the same others."""

    title: str
    about: str
    start: str
    """How the names of its cases begin."""
    others: tuple[str, ...]
    """A column each; everybody in one column when empty."""


_TABLES = (
    _Table("One sender (Fig. 5)", _FIG_5, "F5", (*WAYS, GLOO)),
    _Table("Table 2 and the ablation (Fig. 8)", _FIG_8, "F6", ("send_recv", *ORDERS)),
    _Table("Beyond the paper", _BEYOND, "N", ()),
)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the report says of the cases over links, by name."""

    values: dict[str, dict[str, Mapping[str, Any]]]
    """Rows of a case by contestant."""
    asides: dict[str, dict[str, float]]
    """Other values of a case by column."""
    rest: list[Mapping[str, Any]]
    """Rows of anything else."""


_VERB = "make bench ROOM=reshard && python -m benchmarks.reshard.tables"


def make_page(report: Mapping[str, Any]) -> str:
    """The page as text."""
    found = _sort(report["rows"])
    lines = [
        "# Measured",
        "",
        header_of(report, _VERB, "three that take turns, unless `REPEATS` says otherwise; the median"),
        "",
        f"Links: {report.get('links', 'not measured')} on a host where the paper has four.",
        "",
        "## On shaped links",
        "",
        _ABOUT,
    ]
    for table in _TABLES:
        lines += _lines_of(table, found)
    lines += ["", "## Planner and loopback", "", _LOOPBACK, "", "| what | value | bound | goal |", "|---|---|---|---|"]
    for row in found.rest:
        bound = "" if row.get("bound") is None else f"{row['bound']:.3g}"
        lines.append(f"| {row['case']} | {row['value']:.3g} {row['unit']} | {bound} | {_goal_of(row)} |")
    return "\n".join(lines) + "\n"


def _goal_of(row: Mapping[str, Any]) -> str:
    if row["goal"] is None:
        return ""
    lies_above = not row["ok"] and row.get("bound") is not None and row["bound"] > row["goal"]
    return f"{row['goal']:g}, {verdict_of(row)}" + ("; its bound lies above it" if lies_above else "")


def _sort(rows: Sequence[Mapping[str, Any]]) -> _Found:
    found = _Found({}, {}, [])
    for row in rows:
        name = row["case"]
        end = next((end for end in _ASIDES if name.endswith(end)), None)
        if row["unit"] == _ON_LINKS:
            case, _, contestant = name.rpartition(", ")
            found.values.setdefault(case, {})[contestant] = row
        elif end is not None:
            found.asides.setdefault(name.removesuffix(end), {})[_ASIDES[end]] = row["value"]
        elif _NO_VERDICT not in name:
            found.rest.append(row)
    return found


def _lines_of(table: _Table, found: _Found) -> Iterator[str]:
    cases = [case for case in found.values if case.startswith(table.start) and OURS in found.values[case]]
    if not cases:
        return
    heads = ["case", OURS, "goal", *(table.others or ("beside it",)), "t", "bytes", "load"]
    yield from ("", f"### {table.title}", "", table.about, "")
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for case in cases:
        values, asides = found.values[case], found.asides.get(case, {})
        ours = values[OURS]
        goal = "no verdict: busy" if ours["goal"] is None else f"{ours['goal']:.2f}, {verdict_of(ours)}"
        others = [f"{values[name]['value']:.2f}" if name in values else "" for name in table.others]
        if not table.others:
            others = [", ".join(f"{name} {row['value']:.2f}" for name, row in values.items() if name != OURS)]
        ends = [
            f"{asides['t']:.2f} s" if "t" in asides else "",
            f"{asides['nics']:.3f}" if "nics" in asides else "",
            f"{asides['load']:.1f}" if "load" in asides else "",
        ]
        yield "| " + " | ".join([case, f"**{ours['value']:.3f}**", goal, *others, *ends]) + " |"


if __name__ == "__main__":
    main()
