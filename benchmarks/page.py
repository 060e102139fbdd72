"""Page of measured figures: its words stand in ``docs``, its tables are written from the rows of a report.

A page has a head (what repeats it, commit, machine, load) and places for tables, by name:

    <!-- figures: recovery -->
    <!-- /figures -->

A table takes the rows whose names have its form. The kinds of tables:

- `Plain`: a line for each row;
- `Cases`: a line for each case, a column for each contestant. `Bars` draws it, and `Growth` where it is over sizes;
- `Grid`: the same for ordered pairs, with a sign in each cell.

Benchmarks write reports; ``python -m benchmarks.pages`` writes pages, and refuses a report that nobody could repeat.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.plots import plot_bars, plot_growth
from benchmarks.report import OUT, Row, describe_value

DOCS = Path(__file__).resolve().parents[1] / "docs"
_START, _END = "<!-- figures: {} -->", "<!-- /figures -->"
_PLACE = re.compile(rf"{_START.format('([^>]+)')}.*?{_END}", re.DOTALL)
_HEAD = re.compile(r"^\*Figures written by .*\*$", re.MULTILINE)
_NOT_RUN = "*Not run this time.*"
_MODEL = "Nothing is measured: a model, the same on every machine."
_DIGITS = {"x bound": ".3f", "ratio": ".2f", "fraction": ".2f", "share": ".2f", "exponent": ".2f"}
"""By unit, of a cell; other units are whole numbers or have one digit."""
_READ_WITH_UNIT = ("s", "bytes")
Report = Mapping[str, Any]
"""As it is in its file; see `benchmarks.report.save_report`."""
Found = Sequence[tuple[re.Match[str], Row]]
"""Rows of a table, each with its name as the table's pattern has matched it."""


class NotRepeatable(ValueError):
    """A report that names no commit whose benchmark would give it again."""


# --- cells ---


def goal_of(row: Row) -> str:
    """The goal of a row, and whether it was reached; empty without one."""
    if row.goal is None:
        return ""
    goal = describe_value(row.goal, row.unit) if row.unit in _READ_WITH_UNIT else f"{row.goal:g}"
    lies_above = not row.ok and row.bound is not None and row.value > row.goal and row.bound > row.goal
    return f"{goal}, {'reached' if row.ok else '**missed**'}" + ("; its bound lies above it" if lies_above else "")


def cell_of(row: Row | None) -> str:
    """A value under the head of its column, which names what is counted; with its goal."""
    if row is None:
        return ""
    digits = _DIGITS.get(row.unit, ",.0f" if row.value == int(row.value) else ",.1f")
    value = describe_value(row.value, row.unit) if row.unit in _READ_WITH_UNIT else format(row.value, digits)
    return f"{value} ({goal_of(row)})" if row.goal is not None else value


@dataclass(frozen=True, slots=True)
class Column:
    """What a table of rows shows of each."""

    head: str
    text: Callable[[Row], str]


VALUE = Column("value", lambda row: describe_value(row.value, row.unit))
GOAL = Column("goal", goal_of)
BOUND = Column("bound", lambda row: "" if row.bound is None else describe_value(row.bound, row.unit))
SPREAD = Column("spread", lambda row: "" if row.spread is None else f"{row.spread:.2f}")


# --- kinds of tables ---


@dataclass(frozen=True, slots=True)
class Plain:
    """A line for each row."""

    rows: str = ""
    """Pattern of the whole name of a row; empty for those that no other table takes."""
    columns: Sequence[Column] = (VALUE, GOAL)
    picture: None = None

    def lines(self, found: Found) -> list[str]:
        """The table."""
        lines = [[row.case, *(column.text(row) for column in self.columns)] for _, row in found]
        return table(["case", *(column.head for column in self.columns)], lines)


@dataclass(frozen=True, slots=True)
class Cases:
    """A line for each case, a column for each contestant."""

    rows: str
    """Pattern of the whole name of a row: the group ``what`` is the contestant, the others are the case."""
    columns: Sequence[str] = ()
    """Contestants in this order; as they come when empty."""
    by: Sequence[str] = ()
    """Groups that are the case, in this order; all when empty. Lines that begin alike stand together."""
    picture: Bars | Growth | None = None

    def lines(self, found: Found) -> list[str]:
        """The table."""
        by = self.by or [name for name in found[0][0].re.groupindex if name != "what"]
        cases: dict[tuple[str, ...], dict[str, Row]] = {}
        for match, row in found:
            cases.setdefault(tuple(match[name] for name in by), {})[match["what"]] = row
        columns = self.columns or list(dict.fromkeys(match["what"] for match, _ in found))
        starts = list(dict.fromkeys(start for start, *_ in cases))
        lines = [
            [*case, *(cell_of(cases[case].get(name)) for name in columns)]
            for case in sorted(cases, key=lambda case: starts.index(case[0]))
        ]
        return table([*(name.replace("_", " ") for name in by), *columns], lines)


@dataclass(frozen=True, slots=True)
class Grid:
    """A sign for each ordered pair of names: whether it came out right, each time."""

    rows: str
    """Pattern with the groups ``configuration``, the line, and ``what``, the column."""
    picture: None = None

    def lines(self, found: Found) -> list[str]:
        """The table, with a number for each column."""
        names = list(dict.fromkeys(name for match, _ in found for name in match.groups()))
        signs = {match.groups(): "=" if row.value == 1 else "**x**" for match, row in found}
        lines = [
            [str(number), line, *("" if line == name else signs.get((line, name), "·") for name in names)]
            for number, line in enumerate(names, 1)
        ]
        return table(["", "configuration", *map(str, range(1, len(names) + 1))], lines)


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table as Markdown."""
    head, *others = (f"| {' | '.join(line)} |" for line in (heads, *lines))
    return [head, f"|{'---|' * len(heads)}", *others]


# --- pictures ---


@dataclass(frozen=True, slots=True)
class Bars:
    """A table as groups of bars."""

    file: str
    title: str
    case: str
    """Group of the pattern that names a group of bars."""

    def draw(self, found: Found) -> str:
        """The picture as SVG."""
        table: dict[str, dict[str, float]] = {}
        for match, row in found:
            table.setdefault(match[self.case], {})[match["what"]] = row.value
        return plot_bars(table, self.title)


@dataclass(frozen=True, slots=True)
class Growth:
    """A table over sizes as curves."""

    file: str
    title: str
    curve: str
    """Group of the pattern that names the curve of a row."""
    size: str
    """Group that begins with its size; rows without digits there are not drawn."""
    sizes_are: str
    only: Sequence[str] = ()
    """What is drawn, of the group ``what``; all when empty."""
    unit: str = ""
    goals: Mapping[int, float] | None = None
    """By size."""
    linear: str = ""
    """A curve beside which linear growth is drawn."""

    def draw(self, found: Found) -> str:
        """The picture as SVG."""
        curves: dict[str, dict[int, float]] = {}
        for match, row in found:
            if (digits := re.match(r"\d+", match[self.size])) and (not self.only or match["what"] in self.only):
                curves.setdefault(match[self.curve], {})[int(digits[0])] = row.value
        dashed = f"linear in the {self.sizes_are}"
        if self.linear in curves:
            first, *_ = curve = curves[self.linear]
            curves[dashed] = {size: curve[first] * size / first for size in curve}
        return plot_growth(curves, self.title, self.sizes_are, unit=self.unit, goals=self.goals, dashed=(dashed,))


# --- pages ---


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the documentation whose tables are written from a report."""

    name: str
    """Its path below ``docs``, without the ending; the first part is the room."""
    verb: str
    """What writes the report."""
    runs: str
    """How often each value was measured, and which of the measurements stands here; empty for a model."""
    tables: Mapping[str, Plain | Cases | Grid]
    """By their places on the page."""
    report: str = ""
    """Name of the report; that of the room when empty."""
    rows: str = ".*"
    """Pattern of the names of the report's rows that belong here."""

    @property
    def report_path(self) -> Path:
        """Where the benchmark leaves its report."""
        return OUT / f"{self.report or self.name.partition('/')[0]}.json"

    def find(self, report: Report) -> Mapping[str, Found]:
        """Rows by table: each is in the first that takes it."""
        found: dict[str, list[tuple[re.Match[str], Row]]] = {name: [] for name in self.tables}
        order = sorted(self.tables, key=lambda name: not self.tables[name].rows)
        for row in (Row(**told) for told in report["rows"] if re.fullmatch(self.rows, told["case"])):
            for name in order:
                if match := re.fullmatch(self.tables[name].rows or ".*", row.case):
                    found[name].append((match, row))
                    break
        return found

    def fill(self, text: str, report: Report) -> str:
        """The page with another head and other tables; ValueError unless it has a place for each of them."""
        if (num_heads := len(_HEAD.findall(text))) != 1:
            raise ValueError(f"docs/{self.name}.md: found {num_heads} lines *Figures written by ...*, expected one")
        found, head = self.find(report), self.head(report)
        tables = {name: self.tables[name].lines(rows) if rows else [_NOT_RUN] for name, rows in found.items()}
        return fill_places(_HEAD.sub(lambda _: head, text), tables, f"docs/{self.name}.md")

    def head(self, report: Report) -> str:
        """The paragraph under the title: what repeats the page, from which commit, where, under which load."""
        start = f"*Figures written by `{self.verb} && python -m benchmarks.pages {self.name}`, which repeats them."
        if not self.runs:
            return f"{start} {_MODEL}*"
        machine, versions = report["machine"], report["versions"]
        before, after = (", ".join(f"{value:.1f}" for value in report[key]) for key in ("load_before", "load"))
        torch = f", torch {versions['torch']}" if "torch" in versions else ""
        notes = [f"; {note}" for note in report.get("notes", ()) if note]
        notes += ["; other programs ran beside"] if report["load_before"][0] > machine["num_cores"] else []
        notes += ["; the small set of `QUICK=1`"] if report["quick"] else []
        return (
            f"{start} Commit {report['commit'][:12]}; {machine['num_cores']} cores, {machine['system']}, "
            f"Python {versions['python'].split()[0]}{torch}; load {before} before, {after} after (1, 5, 15 minutes). "
            f"Runs: {self.runs}{''.join(notes)}.*"
        )

    def write(self, report: Report, folder: Path = DOCS) -> None:
        """Write the figures of the page; NotRepeatable unless the report names a commit and all that was in it."""
        check_commit(report, f"writing docs/{self.name}.md")
        path = folder / f"{self.name}.md"
        path.write_text(self.fill(path.read_text(), report))
        for name, found in self.find(report).items():
            picture = self.tables[name].picture
            if picture and found:
                (path.parent / picture.file).write_text(picture.draw(found))


def fill_places(text: str, tables: Mapping[str, Sequence[str]], page: str) -> str:
    """The text of a page with these lines in their places; ValueError unless it has a place for each."""
    if (places := sorted(_PLACE.findall(text))) != sorted(tables):
        raise ValueError(f"{page}: found places for {', '.join(places)}, expected {', '.join(sorted(tables))}")
    return _PLACE.sub(lambda place: "\n".join([_START.format(place[1]), "", *tables[place[1]], "", _END]), text)


def check_commit(report: Report, doing: str) -> None:
    """Raise NotRepeatable where the code that has measured is in no commit."""
    commit = report.get("commit")
    if not commit:
        raise NotRepeatable(
            f"{doing}: its report names no commit, expected one; measure again in a clone of the project"
        )
    if commit.endswith("+"):
        raise NotRepeatable(
            f"{doing}: its report is of commit {commit[:12]} with changes that were not committed, expected a commit "
            "alone; commit them, and measure again"
        )
