"""Settings that all nodes of a job must share, compared when an agent joins.

The first agent writes its settings (the *card*) under the job's name in the store; each later one compares its own with
it. A difference means that two jobs use one name, or that one node was started wrongly; both are reported before any
worker runs. Scripts are compared by file name only, arguments not at all: nodes may keep their files in different
places, and may get different arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class JobCard:
    """The settings that all nodes of a job must share."""

    mode: str
    min_nodes: int
    max_nodes: int
    script: str
    """Last part of the script's path, or the module's name."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def describe_difference(run_id: str, mine: JobCard, found: Mapping[str, Any]) -> str | None:
    """The text for the user when ``found`` is another job's card; None when it is this job's."""
    differing = [
        f"{name.replace('_', ' ')} is {found.get(name)!r} there and {value!r} here"
        for name, value in mine.to_json().items()
        if found.get(name) != value
    ]
    if not differing:
        return None
    return (
        f"joining job {run_id!r}: another job with this name is running: {'; '.join(differing)}; "
        "give this job another --rdzv-id, or start this node as the others were started"
    )
