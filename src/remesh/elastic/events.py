"""What happened: one JSON line per event, one file per process, for people, reports and dashboards.

Every line has ``t`` (seconds since the epoch), ``who`` and ``kind``; the rest depends on the kind. A line is written
with one call, so that a process killed in the middle leaves at most one cut line, which readers skip.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events to ``<folder>/<who>.jsonl``; a log without folder takes them and keeps nothing."""

    def __init__(self, folder: Path | None, who: str) -> None:
        self._who = who
        self._descriptor: int | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / f"{who}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **values: Any) -> None:
        if self._descriptor is not None:
            line = json.dumps({"t": time.time(), "who": self._who, "kind": kind, **values})
            os.write(self._descriptor, line.encode() + b"\n")


class EventReader:
    """Follows all logs of a folder; each :meth:`poll` returns what is new, ordered by time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_bytes: dict[Path, int] = {}

    def poll(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(complete)
            events += _parse(complete)
        return sorted(events, key=lambda event: float(event["t"]))


def _parse(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "t" in event and "kind" in event:
            yield event
