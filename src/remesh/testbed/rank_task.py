"""What do a testbed and its ranks say to each other? One task for each, one answer from each."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from remesh.testbed.inside import Door


@dataclass(frozen=True, slots=True)
class Task:
    """What one rank is to do."""

    door: Door
    rank: int
    world_size: int
    store_address: str
    store_port: int
    store_prefix: str
    """Fresh for every run: keys of two runs never meet."""
    group_timeout_s: float
    call: bytes
    """Pickled function and arguments; opened in the rank's process."""
    log_path: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it."""

    result: bytes | None
    """The pickled result, or None when the call failed."""
    traceback: str = ""


def enter(body: str, *arguments: Any) -> None:
    """Body of a forked process, told by name, so that whoever forks it needs no torch."""
    getattr(importlib.import_module("remesh.testbed.rank_body"), body)(*arguments)
