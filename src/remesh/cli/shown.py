"""Output of the verbs: tables for people, one JSON document with ``--json``, progress bars.

Progress goes to stderr, if that is a terminal, and is gone when the work is done: a bar with the time left, or the time
that has passed where the amount of work is unknown.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
"""The option of every verb that lists or shows."""


def print_json(value: Any) -> None:
    """Print a value for programs; what JSON has no form for, NaN and infinity among it, stands as its text."""
    click.echo(json.dumps(_for_json(value), indent=1, default=str, allow_nan=False))


def texts_of(keys: Iterable[Any]) -> list[str]:
    """Each key as text; where two would be the same, as 1 and ``"1"``, all as Python writes them."""
    keys = list(keys)
    texts = [*map(str, keys)]
    return texts if len({*texts}) == len(texts) else [*map(repr, keys)]


def _for_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return dict(zip(texts_of(value), map(_for_json, value.values()), strict=True))
    return [_for_json(one) for one in value] if isinstance(value, list | tuple) else value


def progress_of_bytes() -> Progress:
    """A bar for work that is counted in bytes."""
    from rich.progress import DownloadColumn, TransferSpeedColumn  # noqa: PLC0415  costs time: only where something is drawn

    counted = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    return _bar(*counted)


def with_progress(items: Iterable[T], what: str) -> Iterator[T]:
    """The items one by one, with a bar that counts them."""
    from rich.progress import MofNCompleteColumn  # noqa: PLC0415  costs time: only where something is drawn

    all_items = list(items)
    if not all_items:
        return
    with _bar(MofNCompleteColumn()) as progress:
        task = progress.add_task(what, total=len(all_items))
        for item in all_items:
            yield item
            progress.advance(task)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show the time that has passed while work of unknown length runs."""
    from rich.console import Console  # noqa: PLC0415  costs time: only where something is drawn
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415  as above

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(what, total=None)
        yield


def _bar(*counted: Any) -> Progress:
    from rich.console import Console  # noqa: PLC0415  costs time: only where something is drawn
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415  as above

    columns = (TextColumn("{task.description}"), BarColumn(), *counted, TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def print_table(headings: Iterable[str], rows: Iterable[Iterable[Any]], *, lines: bool = True) -> None:
    """Print a table for people; a cell is text, which is never markup, or a `rich.text.Text` with a style.

    In a pipe or a file no cell is cut, however long its line becomes.
    """
    from rich.box import HEAVY_HEAD  # noqa: PLC0415  as above
    from rich.console import Console  # noqa: PLC0415  as above
    from rich.table import Column, Table  # noqa: PLC0415  as above
    from rich.text import Text  # noqa: PLC0415  as above

    table = Table(
        *(Column(Text(heading)) for heading in headings), box=HEAVY_HEAD if lines else None, header_style="bold"
    )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell, overflow="fold") for cell in row))
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = max(
            console.width, console.measure(table, options=console.options.update(width=1 << 20)).maximum
        )
    console.print(table)
