"""How do verbs show what they found, and how far they are? As tables, or with ``--json`` as one JSON document.

Progress goes to stderr, where somebody is looking: a bar with the time left, gone when the work is done.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

T = TypeVar("T")

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
"""The option of every verb that lists or shows."""


def print_json(value: Any) -> None:
    """Print a value for programs; what JSON has no form for, NaN and infinity among it, stands as its text."""
    click.echo(json.dumps(_without_nan(value), indent=1, default=str, allow_nan=False))


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    return [_without_nan(one) for one in value] if isinstance(value, list | tuple) else value


def progress_of_bytes() -> Progress:
    """A bar for work that is counted in bytes."""
    counted = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    return _bar(*counted)


def with_progress(items: Iterable[T], what: str) -> Iterator[T]:
    """The items one by one, with a bar that counts them."""
    all_items = list(items)
    if not all_items:
        return
    with _bar(MofNCompleteColumn()) as progress:
        task = progress.add_task(what, total=len(all_items))
        for item in all_items:
            yield item
            progress.advance(task)


def _bar(*counted: Any) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), *counted, TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
