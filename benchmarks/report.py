"""Where do measured numbers go? The rows of one room, with what is needed to judge them, in benchmarks/out/.

A row tells one case of one experiment. Wherever a peer or a bound exists in the same run, its value is the
ratio against it, because ratios survive a change of machine. A row that misses its goal stays in.
"""

from __future__ import annotations

import json
import os
import platform
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


def verdict_of(row: Mapping[str, Any]) -> str:
    """Whether a row of a report, as read from its file, reached its goal: for pages."""
    return "reached" if row["ok"] else "**missed**"


def describe_value(value: float, unit: str) -> str:
    """A value in the unit that people read: ``0.0123, "s"`` is 12.3 ms."""
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "bytes":
        return f"{value / (1 << 20):.3g} MiB" if value >= 1 << 20 else f"{value / (1 << 10):.3g} KiB"
    return f"{value:.3g}" if unit == "ratio" else f"{value:.3g} {unit}"


def is_quick() -> bool:
    """Whether the smaller set was asked for (``QUICK=1``)."""
    return os.environ.get("QUICK", "") not in ("", "0")


def describe_run(seed: int | None) -> dict[str, Any]:
    """Commit, machine, load and versions: without these a number means nothing."""
    return {
        "commit": _commit(),
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


def header_of(report: Mapping[str, Any], verb: str, runs: str) -> str:
    """The paragraph under the title of a measured page: what repeats it, from which commit, where, under which load.

    ``report`` is what `describe_run` says, by itself or in a report; ``runs`` how often each value was measured and
    which of the measurements stands on the page.
    """
    machine, versions = report["machine"], report["versions"]
    before, after = (", ".join(f"{value:.1f}" for value in report[key]) for key in ("load_before", "load"))
    torch = f", torch {versions['torch']}" if "torch" in versions else ""
    return (
        f"*Written by `{verb}`, which repeats it; do not edit. Commit {(report['commit'] or 'unknown')[:12]}; "
        f"{machine['num_cores']} cores, {machine['system']}, Python {versions['python'].split()[0]}{torch}; "
        f"load {before} before, {after} after (1, 5, 15 minutes). Runs: {runs}"
        f"{'; the small set of `QUICK=1`' if report['quick'] else ''}.*"
    )


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


def _commit() -> str | None:
    """The commit of the tree, with ``+`` when it has changes; None outside a repository."""
    try:
        head = _git("rev-parse", "HEAD").strip()
        return head + ("+" if _git("status", "--porcelain").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=_ROOT, capture_output=True, text=True, check=True, timeout=30).stdout
