"""Turns the room's report into ``docs/checkpoint/measured.md``: ``python -m benchmarks.checkpoint.tables``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import OUT, describe_value, header_of, verdict_of

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoint" / "measured.md"
_SECTIONS = (
    (
        "Saving and loading",
        "One process, files in the page cache when they are loaded. Rounds of all programs alternate, the least of "
        "each counts. The bound of a save is one write and fsync of the same bytes from one buffer, that of a load one "
        "read of them into memory that is there. DCP reads large tensors into memory of its own first: new memory, "
        "which the system fills with zeros, as in a program that has just started, or memory that the C library has "
        "kept. A load of ours needs neither.",
        (": save", ": load"),
    ),
    (
        "Parts of a chunk",
        "One square matrix, saved as one chunk, of which a part is wanted.",
        ("an eighth of the",),
    ),
    (
        "In the background",
        "*Blocked* is the time that the training loop spends in calls, until the checkpoint is committed. A thread "
        "or a process writes a copy. A save that copies blocks at least as long as a plain copy, whose share of a "
        "foreground save is the second row: the goal of 0.05 is below it on this machine.",
        ("in the background by a",),
    ),
    (
        "Sums, checks, conversions",
        "Beside one read of the files, or one read and one write with fsync.",
        ("SHA-256", "verify", "convert"),
    ),
    (
        "Planning",
        "What one of so many ranks does to agree with the others, without the network; the index as bytes is written "
        "by the first rank alone.",
        (" ranks, ",),
    ),
)
"""Title, what to know, and words of the cases; a row belongs to the last section that has one of its words."""


_VERB = "make bench ROOM=checkpoint && python -m benchmarks.checkpoint.tables"


def main() -> None:
    _PAGE.write_text(make_page(json.loads((OUT / "checkpoint.json").read_text())))


def make_page(report: Mapping[str, Any]) -> str:
    """The page as text."""
    lines = [
        "# Measured",
        "",
        header_of(report, _VERB, "rounds of all programs in turn, the least of each"),
        "",
        "A ratio is the time over the bound, or, if the case names a peer, the peer's time over that of Remesh.",
    ]
    for title, note, _ in _SECTIONS:
        rows = [row for row in report["rows"] if _section_of(row["case"]) == title]
        if rows:
            lines += ["", f"## {title}", "", note, "", "| case | value | goal |", "|---|---|---|", *map(_line_of, rows)]
    return "\n".join(lines) + "\n"


def _section_of(case: str) -> str:
    found: Sequence[str] = [title for title, _, words in _SECTIONS if any(word in case for word in words)]
    return found[-1] if found else _SECTIONS[0][0]


def _line_of(row: Mapping[str, Any]) -> str:
    goal = "" if row["goal"] is None else f"{describe_value(row['goal'], row['unit'])}, {verdict_of(row)}"
    return f"| {row['case']} | {describe_value(row['value'], row['unit'])} | {goal} |"


if __name__ == "__main__":
    main()
