"""Metrics of a job in the OpenMetrics format, folded from its events.

    remesh_events_total{kind="..."}      how often each kind of event happened on this node
    remesh_generation                    number of the present generation (in-process) or round (restart mode)
    remesh_world_size                    workers with a place in it
    remesh_workers_running               processes of this node that run
    remesh_restarts_total                processes started in place of others
    remesh_ended{category="..."}         1 once the job has ended; category "none" when it ended well

Format: https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
MAX_KINDS = 64
"""User code names kinds of events; more than this many are counted together, so that memory stays bounded."""


class Metrics:
    """Numbers that grow by :meth:`take` and are read by :meth:`render`."""

    def __init__(self) -> None:
        self._events: Counter[str] = Counter()
        self._running: dict[int, int] = {}
        self._slots_started: set[int] = set()
        self._num_restarts = 0
        self._generation = 0
        self._world_size = 0
        self._ended: str | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """Add one event."""
        kind = str(event["kind"])
        known = kind in self._events or len(self._events) < MAX_KINDS
        self._events[kind if known else "other"] += 1
        match kind:
            case "generation":
                self._generation = int(event["number"])
                self._world_size = len(event["members"])
            case "round":
                self._generation, self._world_size = int(event["number"]), int(event["world_size"])
            case "worker-started":
                slot = int(event["slot"])
                self._num_restarts += slot in self._slots_started
                self._slots_started.add(slot)
                self._running[slot] = int(event["pid"])
            case "worker-exited":
                self._running.pop(int(event["slot"]), None)
            case "finish":
                self._ended = str(event.get("category") or "none")

    def render(self) -> str:
        """All numbers, as one OpenMetrics exposition.

        >>> Metrics().render().splitlines()[-1]
        '# EOF'
        """
        lines = ["# TYPE remesh_events counter", "# HELP remesh_events Events of this node, by kind."]
        lines += [
            f'remesh_events_total{{kind="{_escape(kind)}"}} {count}' for kind, count in sorted(self._events.items())
        ]
        for name, help_text, value in (
            ("remesh_generation", "Number of the present generation or round.", self._generation),
            ("remesh_world_size", "Workers with a place in it.", self._world_size),
            ("remesh_workers_running", "Worker processes of this node.", len(self._running)),
        ):
            lines += [f"# TYPE {name} gauge", f"# HELP {name} {help_text}", f"{name} {value}"]
        lines += [
            "# TYPE remesh_restarts counter",
            "# HELP remesh_restarts Processes started in place of others.",
            f"remesh_restarts_total {self._num_restarts}",
            "# TYPE remesh_ended gauge",
            "# HELP remesh_ended 1 once the job has ended, by category of failure.",
        ]
        if self._ended is not None:
            lines.append(f'remesh_ended{{category="{_escape(self._ended)}"}} 1')
        return "\n".join([*lines, "# EOF"]) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
