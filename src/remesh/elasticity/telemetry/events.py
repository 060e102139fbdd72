"""Event log of a job: one JSON line per event, one file per process, for people, reports and dashboards.

Every line has ``t`` (seconds since the epoch), ``who`` and ``kind``; the rest depends on the kind. A line is written
with one call, so that a process killed in the middle leaves at most one cut line, which readers skip. A log does not
stop what it logs: where a line cannot be written, as on a full disk, it is lost, and one line on stderr reports that.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from remesh.foundation.errors import ConfigError, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOST_DIGITS = 18
"""Of numbers below 2^63."""


class EventLog:
    """Appends events to ``<folder>/<who>.jsonl`` and shows each to ``listener``; a log without folder keeps nothing."""

    def __init__(self, folder: Path | None, who: str, listener: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._who = who
        self._listener = listener
        self._descriptor: int | None = None
        self._is_cut = self._told_lost = False
        """Whether the last line was not written whole; whether the loss of lines was reported."""
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(folder / f"{who}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            except OSError as error:
                if error.errno in _FULL:
                    self._note_lost(error)
                    return
                raise StorageError(
                    f"opening the event log of {who}: folder {folder} cannot be written ({error}); give another "
                    "--events-dir, or leave it out"
                ) from error

    def write(self, kind: str, /, **values: Any) -> None:
        """Note what happened; raises `ConfigError` for values that would take the place of the log's own fields."""
        event = {"t": time.time(), "who": self._who, "kind": kind}
        if clash := sorted(event.keys() & values):
            raise ConfigError(f"logging {kind!r}: {clash[0]!r} is a field of the log itself; choose another name")
        event |= values
        if self._listener is not None:
            self._listener(event)
        if self._descriptor is not None:
            line = b"\n" * self._is_cut + json.dumps(event).encode() + b"\n"
            try:
                self._is_cut = os.write(self._descriptor, line) < len(line)
            except OSError as error:
                self._note_lost(error)

    def _note_lost(self, error: OSError) -> None:
        if not self._told_lost:
            self._told_lost = True
            sys.stderr.write(f"remesh: the event log of {self._who} loses lines, and the job goes on: {error}\n")

    def close(self) -> None:
        """Give the file back; a closed log keeps nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class EventReader:
    """Follows all logs of a folder; each :meth:`poll` returns what is new, ordered by time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_bytes: dict[Path, int] = {}

    def poll(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            try:
                with path.open("rb") as file:
                    file.seek(self._read_bytes.get(path, 0))
                    data = file.read()
            except OSError:  # removed since it was listed, or not for us to read, or a folder
                continue
            complete = data[: data.rfind(b"\n") + 1]
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(complete)
            events += _parse(complete)
        return sorted(events, key=lambda event: float(event["t"]))


def _parse(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        try:
            event = json.loads(line, parse_int=_number)
            is_event = isinstance(event["kind"], str) and math.isfinite(event["t"])
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
            # A line of another program, or one that was cut: a reader goes on, whatever is in it.
            continue
        if is_event:
            yield event


def _number(digits: str) -> int | float:
    """A whole number; one that no browser and no array holds as such is a float."""
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)
