"""Output of the verbs: lines and tables for people, one JSON document with ``--json``, progress bars.

Nothing else in Remesh's commands prints. Texts come out of files that any program may have written, so a text is never
markup, and a character that a terminal would obey, not show, stands as its escape.

Progress goes to stderr, if that is a terminal, and is gone when the work is done: a bar with the time left, or the time
that has passed where the amount of work is unknown.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from remesh.foundation.visible_text import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

T = TypeVar("T")

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
"""The option of every verb that lists or shows."""


def say(*lines: str, err: bool = False, indent: int = 0) -> None:
    """Print lines for people, to stderr with ``err``; each stays one line, whatever is in it."""
    for line in lines:
        click.echo(" " * indent + visible(line), err=err)


def say_text(text: str, *, err: bool = False) -> None:
    """Print a text of several lines, such as a picture or an error's."""
    say(*text.split("\n"), err=err)


def width_of_terminal() -> int:
    """Columns of the terminal; 80 in a pipe."""
    return shutil.get_terminal_size().columns


def print_json(value: Any) -> None:
    """Print a value for programs; what JSON has no form for, NaN and infinity among it, stands as its text."""
    print_document(json.dumps(_for_json(value), indent=1, default=str, allow_nan=False) + "\n")


def print_document(text: str) -> None:
    """Print a text for programs, which take every character as it is."""
    click.echo(text, nl=False)


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
        task = progress.add_task(visible(what), total=len(all_items))
        for item in all_items:
            yield item
            progress.advance(task)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show the time that has passed while work of unknown length runs."""
    from rich.progress import SpinnerColumn, TimeElapsedColumn  # noqa: PLC0415  costs time: only where something is drawn

    with _progress(SpinnerColumn(), TimeElapsedColumn(), text_at=1) as progress:
        progress.add_task(visible(what), total=None)
        yield


def _bar(*counted: Any) -> Progress:
    from rich.progress import BarColumn, TimeRemainingColumn  # noqa: PLC0415  as above

    return _progress(BarColumn(), *counted, TimeRemainingColumn(), text_at=0)


def _progress(*columns: Any, text_at: int) -> Progress:
    from rich.progress import Progress, TextColumn  # noqa: PLC0415  as above

    text = TextColumn("{task.description}", markup=False)
    return Progress(*columns[:text_at], text, *columns[text_at:], console=console(err=True), transient=True)


def console(*, err: bool = False) -> Console:
    """A console for what is drawn, with no styles but ours."""
    from rich.console import Console  # noqa: PLC0415  as above

    return Console(file=sys.stderr if err else sys.stdout, highlight=False, markup=False)


def print_table(
    headings: Iterable[str], rows: Iterable[Iterable[Any]], *, lines: bool = True, right: Container[str] = ()
) -> None:
    """Print a table for people; a cell is a text, or a `rich.text.Text` of ours with a style.

    Columns under a heading in ``right`` are aligned to the right. In a pipe or a file no cell is cut, however long its
    line becomes.
    """
    from rich.box import HEAVY_HEAD  # noqa: PLC0415  as above
    from rich.table import Column, Table  # noqa: PLC0415  as above
    from rich.text import Text  # noqa: PLC0415  as above

    columns = (Column(Text(heading), justify="right" if heading in right else "left") for heading in headings)
    table = Table(*columns, box=HEAVY_HEAD if lines else None, header_style="bold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(visible(cell), overflow="fold") for cell in row))
    target = console()
    if not target.is_terminal:
        target.width = max(target.width, target.measure(table, options=target.options.update(width=1 << 20)).maximum)
    target.print(table)
