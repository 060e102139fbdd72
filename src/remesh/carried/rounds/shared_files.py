"""Agreement of all ranks on the files that they write to, when a checkpoint is committed.

Each rank notes its files when it stands still itself; ranks that stop later may have written to them until then. All
stand until the last has stopped, so what was seen last is what the file was at the cut: by the time that the file
system gave its last change, then by its length, then by the clock of who looked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from remesh.wire.messages import Message

_CONTENT = ("num_bytes", "mtime_ns", "sha256")
_ORDER = itemgetter("mtime_ns", "num_bytes", "seen_ns")


def agree_on_files(reports: Mapping[int, Message]) -> dict[int, Message]:
    """The reports of all ranks, in which a file has the same length, time and digest for all who have it."""
    latest: dict[str, Mapping[str, Any]] = {}
    for report in reports.values():
        for file in report.get("written_files", ()):
            latest[file["place"]] = max(latest.get(file["place"], file), file, key=_ORDER)
    return {
        rank: {**report, "written_files": _as_seen_last(report.get("written_files", ()), latest)}
        for rank, report in reports.items()
    }


def _as_seen_last(
    files: Sequence[Mapping[str, Any]], latest: Mapping[str, Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    return [{**file, **{name: latest[file["place"]][name] for name in _CONTENT}} for file in files]
