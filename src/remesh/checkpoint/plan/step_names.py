"""Names of checkpoint directories by step; names sort like steps."""

from __future__ import annotations

import re

_STEP_NAME = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Name of the directory of a step's checkpoint under a root; names sort like steps.

    >>> step_name(120)
    'step-00000120'
    """
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a directory's name as made by `step_name`; None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None
