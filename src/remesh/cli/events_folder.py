"""Checks of a folder of event logs, and the title of its job, for the dashboard and ``remesh top``."""

from __future__ import annotations

from pathlib import Path

from remesh.foundation.errors import ConfigError


def check_folder(events_dir: Path) -> None:
    """Raises `ConfigError` unless the folder is there."""
    if not events_dir.is_dir():
        raise ConfigError(
            f"showing a job: {events_dir} is not a folder, expected the folder of a job's event logs; give the "
            "folder that was passed to remesh run --events-dir"
        )


def describe_empty(events_dir: Path) -> str | None:
    """Advice for a folder without a log; None if it has one."""
    if any(events_dir.glob("*.jsonl")):
        return None
    inner = sorted(path.parent.name for path in events_dir.glob("*/*.jsonl"))
    hint = f"its folder {inner[0]!r} has some" if inner else "give the folder of remesh run --events-dir"
    return f"no event logs (*.jsonl) in {events_dir}; {hint}, or wait until the job has started"


def title_of(events_dir: Path) -> str:
    """The title of the job: the last two parts of its folder's path."""
    return "/".join(events_dir.absolute().parts[-2:])
