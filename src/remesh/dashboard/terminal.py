"""Terminal view of a job: one screen of text, made of what the page shows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from remesh.dashboard.story import GenerationStory, Story
from remesh.foundation.visible_text import visible

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 44
_COLOURS = {
    "training": "green",
    "filling": "yellow",
    "starting": "yellow",
    "left": "yellow",
    "standby": "blue",
    "done": "blue",
    "gone": "red",
    "running": "green",
    "ended": "blue",
    "failed": "red",
}


def render(story: Story, title: str, num_happenings: int = 8) -> RenderableType:
    """The newest state of a job; ``num_happenings`` lines of what happened."""
    return Panel(
        Group(_headline(story), _workers(story), *_curves(story), *_moves(story), _happenings(story, num_happenings)),
        title=_text(f"remesh: {title}"),
        title_align="left",
    )


def _headline(story: Story) -> Text:
    current = story.generation
    line = _text(story.state, style=f"bold {_COLOURS.get(story.state, 'yellow')}")
    line.append(f"   step {'-' if story.step is None else story.step}", style="bold")
    if current is not None:
        line.append(visible(f"   {mesh_of(current)}   generation {current.number}: {current.reason}"))
    if story.told:
        line.append(visible(f"   {story.told}"))
    return line


def mesh_of(generation: GenerationStory) -> str:
    """The mesh in one line."""
    return " x ".join(f"{name}={size}" for name, size in generation.axes.items())


def _workers(story: Story) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("rank", "place", "node", "pid", "state", "step"):
        table.add_column(column, justify="right" if column in ("rank", "pid", "step") else "left")
    for worker in sorted(story.workers.values(), key=lambda each: (each.rank is None, each.rank or 0, each.pid)):
        if worker.rank is None and worker.state == "gone":
            continue
        place = " ".join(f"{name}{at}" for name, at in worker.coordinates.items())
        rank, step = ("" if value is None else str(value) for value in (worker.rank, worker.step))
        state = _text(worker.state, style=_COLOURS.get(worker.state, ""))
        table.add_row(rank, _text(place), _text(worker.node), str(worker.pid), state, step)
    return table


def _curves(story: Story) -> list[Text]:
    lines = []
    for name, curve in story.curves.items():
        points = curve.points()
        if points:
            line = _text(f"{name:>18} ", style="bold")
            line.append(sparkline([value for _, value in points]), style="cyan")
            lines.append(line.append(f" {points[-1][1]:.4g}"))
    return lines


def sparkline(values: list[float], width: int = _WIDTH) -> str:
    """The values as bars, the lowest as the shortest; averages of neighbours where there is no room for all.

    >>> sparkline([0.0, 1.0, 2.0])
    '▁▅█'
    """
    if len(values) > width:
        cuts = [len(values) * n // width for n in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def _moves(story: Story) -> list[Text]:
    if not story.moves:
        return []
    move = story.moves[-1]
    line = Text("state ", style="bold")
    source = visible(f"of generation {move.generation} from {move.source}")
    line.append(f"{source}: {move.bytes_moved / 2**20:.1f} MiB between ranks, ")
    return [line.append(f"{move.bytes_from_disk / 2**20:.1f} MiB from disk, {move.seconds:.2f} s")]


def _happenings(story: Story, count: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    newest_s = story.newest_s or 0.0
    for each in list(story.happenings)[-count:]:
        at = f"{each.at_s - newest_s:+.1f} s"
        table.add_row(at, _text(each.who), _text(each.kind), _text(each.text, overflow="ellipsis"))
    return table


def _text(text: str, **how: Any) -> Text:
    """What comes out of event logs, which is never markup."""
    return Text(visible(text), **how)
