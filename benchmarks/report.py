"""Report of a room's benchmarks: rows with what is needed to judge them, in benchmarks/out/.

A row is one case of one experiment. Wherever a peer or a bound exists in the same run, its value is the ratio against
it, because ratios survive a change of machine. A row that misses its goal stays in.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import remesh

_ROOT = Path(__file__).resolve().parent.parent
OUT = _ROOT / "benchmarks" / "out"
_LOAD_BEFORE = os.getloadavg()
"""What others did: at the end it is mostly the benchmark's own."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case."""

    case: str
    value: float
    unit: str
    """``"ratio"``, ``"s"``, ``"bytes"``, ..."""
    goal: float | None = None
    """The value that was to be reached; None when the row is for information."""
    ok: bool | None = None
    """Whether the goal was reached. Invariant: None exactly when there is no goal."""
    peer: str | None = None
    """What the value was compared with, when that is another program's result."""
    bound: float | None = None
    """What no schedule could beat, in the unit of the value."""
    spread: float | None = None
    """Largest over smallest of the repeated measurements, minus 1."""

    def __post_init__(self) -> None:
        if (self.goal is None) != (self.ok is None):
            raise ValueError(f"row {self.case!r}: goal {self.goal} and ok {self.ok} must both be there or both not")


def at_most(case: str, value: float, unit: str, goal: float | None, **more: Any) -> Row:
    """A row whose goal is an upper limit; None for a row without one."""
    return Row(case, value, unit, goal=goal, ok=None if goal is None else value <= goal, **more)


def at_least(case: str, value: float, unit: str, goal: float | None, **more: Any) -> Row:
    """A row whose goal is a lower limit; None for a row without one."""
    return Row(case, value, unit, goal=goal, ok=None if goal is None else value >= goal, **more)


def spread_of(values: Sequence[float]) -> float:
    """Largest over smallest, minus 1."""
    return max(values) / min(values) - 1


def median_of(case: str, values: Sequence[float], unit: str, goal: float | None = None, **more: Any) -> Row:
    """The row of repeated measurements, whose goal is an upper limit: their median, with their spread."""
    return at_most(case, statistics.median(values), unit, goal, spread=spread_of(values), **more)


def describe_value(value: float, unit: str) -> str:
    """A value in the unit that people read: ``0.0123, "s"`` is 12.3 ms."""
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "bytes":
        return f"{value / (1 << 20):.3g} MiB" if value >= 1 << 20 else f"{value / (1 << 10):.3g} KiB"
    return f"{value:.3g}" if unit in ("ratio", "fraction", "share") else f"{value:.3g} {unit}"


def is_quick() -> bool:
    """Whether the smaller set was asked for (``QUICK=1``)."""
    return os.environ.get("QUICK", "") not in ("", "0")


def is_kept() -> bool:
    """Whether rows of the last report stay where they are not measured anew (``KEEP=1``)."""
    return os.environ.get("KEEP", "") not in ("", "0")


def describe_run(seed: int | None) -> dict[str, Any]:
    """Commit, machine, load and versions: without these a number means nothing."""
    return {
        "commit": find_commit(),
        "machine": {
            "system": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "num_cores": os.cpu_count(),
        },
        "load_before": list(_LOAD_BEFORE),
        "load": list(os.getloadavg()),
        "versions": {
            "remesh": remesh.__version__,
            **{name: version(name) for name in ("numpy", "torch")},
            "python": sys.version.split()[0],
        },
        "seed": seed,
        "quick": is_quick(),
    }


def write_report(room: str, rows: Sequence[Row], seed: int | None = None, folder: Path = OUT, **more: Any) -> Path:
    """Write the rows of a room, and what ``more`` there is to say, and print them as a table; the file's path."""
    path = save_report(room, [asdict(row) for row in rows], seed, folder, **more)
    print_rows(rows)
    print(f"written to {path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path}")
    return path


def save_report(
    room: str, rows: Sequence[Mapping[str, Any]], seed: int | None = None, folder: Path = OUT, **more: Any
) -> Path:
    """Write rows as they stand in a report, and what ``more`` there is to say of them; the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{room}.json"
    unfinished = path.with_suffix(".json.new")
    unfinished.write_text(json.dumps({"room": room, **describe_run(seed), **more, "rows": list(rows)}, indent=1) + "\n")
    unfinished.replace(path)
    return path


def print_rows(rows: Sequence[Row]) -> None:
    """Print rows as a table."""
    for row in rows:
        verdict = {None: "", True: "ok", False: "MISSED"}[row.ok]
        goal = "" if row.goal is None else f"(goal {row.goal:g})"
        print(f"{row.case:<60} {row.value:>12.6g} {row.unit:<8} {goal:<16} {verdict}", flush=True)


class Journal:
    """A report that is written again whenever rows come, so that an interrupted run keeps what it has."""

    def __init__(
        self, room: str, seed: int | None = None, folder: Path = OUT, *, keeps: bool = False, **more: Any
    ) -> None:
        """``keeps`` begins with the rows of the last report, which must be of this commit, with the same ``more``."""
        self._room, self._seed, self._folder, self._more = room, seed, folder, more
        self._rows: dict[str, Row] = {}
        path = folder / f"{room}.json"
        if keeps and path.exists():
            report = json.loads(path.read_text())
            for name, expected in {"commit": find_commit(), **more}.items():
                if report.get(name) != expected:
                    raise ValueError(
                        f"keeping the rows of {path.name}: its {name} is {report.get(name)}, expected {expected}; "
                        "measure all of it anew, without KEEP=1 or that file"
                    )
            self._rows = {row["case"]: Row(**row) for row in report["rows"]}

    @property
    def rows(self) -> list[Row]:
        """In the order in which their cases came first."""
        return list(self._rows.values())

    def add(self, rows: Sequence[Row]) -> None:
        """Write the report with these; a row takes the place of the earlier one of its case."""
        self._rows |= {row.case: row for row in rows}
        save_report(self._room, [asdict(row) for row in self.rows], self._seed, self._folder, **self._more)


def find_commit() -> str | None:
    """The commit of the tree, with ``+`` when more than its pages has changed since; None outside a repository."""
    try:
        head = _git("rev-parse", "HEAD").strip()
        return head + ("+" if _git("status", "--porcelain", "--", ".", ":!docs", ":!*.md").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=_ROOT, capture_output=True, text=True, check=True, timeout=30).stdout
