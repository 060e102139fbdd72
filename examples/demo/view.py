"""The demo on a terminal: a live picture while it runs, a table at the end. Without a terminal, one line per event."""

import time
from collections import deque
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
TITLES = {
    "main": "Training on two nodes; one of them will be killed and come back",
    "again-tp": "The same job, started again from its checkpoint as tp=4",
    "again-dp": "The same job, started again from its checkpoint as dp=4",
    "reference": "The same training without any interruption, to compare with",
}


class Screen:
    """What is going on now. Use as a context manager."""

    def __init__(self) -> None:
        self._console = Console()
        self._begun_s = time.monotonic()
        self._lines: deque[str] = deque(maxlen=14)
        self._plan: dict[str, Any] = {}
        self._losses: dict[int, float] = {}
        self._title = ""
        self._last_step = 0
        self._live = Live(console=self._console, refresh_per_second=8, get_renderable=self._draw, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def begin(self, name: str, mesh: str, steps: int) -> None:
        """A new job starts."""
        self._title = TITLES[name]
        self._last_step = steps
        self._plan = {}
        if name == "reference":
            self._losses = {}
        self.say(f"[bold]{self._title}[/bold] (mesh {mesh}, up to step {steps})")

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self._begun_s:6.1f} s  {text}"
        self._lines.append(line)
        if not self._console.is_terminal:
            self._console.print(line, highlight=False, soft_wrap=True)

    def show(self, event: dict[str, Any]) -> None:
        """Take one event of the job's logs."""
        match event["kind"]:
            case "step":
                self._losses[event["step"]] = event["loss"]
            case "generation" if self._plan.get("number") != event["number"]:
                self._plan = event
                self.say(f"mesh {_axes(event['axes'])} from step {event['step']}: {escape(event['reason'])}")
            case "broken" | "pause":
                self.say(f"generation {event['generation']} ends: {escape(event['reason'])}")
            case "filled" if event["rank"] == 0 and event["source"] != "fresh":
                self.say(
                    f"filled from {event['source']}: {_size(event['bytes_kept'])} kept in place on all ranks, "
                    f"{_size(event['bytes_taken'])} over the network and {_size(event['bytes_from_disk'])} from disk "
                    "to rank 0"
                )
            case "saved" if event["rank"] == 0:
                self.say(f"checkpoint of step {event['step']} saved in {event['seconds']:.2f} s")
            case "finish":
                if not event["ok"]:
                    self.say(f"[red]job failed: {escape(event['text'])}[/red]")

    def _draw(self) -> Group:
        step = max(self._losses, default=0)
        status = Text(f"step {step} of {self._last_step}   loss {self._losses.get(step, float('nan')):.4f}   ")
        status.append(sparkline([self._losses[s] for s in sorted(self._losses)], 60), style="cyan")
        return Group(
            Panel(Group(status, self._draw_mesh()), title=self._title, border_style="blue"),
            Panel("\n".join(self._lines), title="events", border_style="dim"),
        )

    def _draw_mesh(self) -> Table:
        """One cell per rank, one line per coordinate of the first axis."""
        grid = Table.grid(padding=(0, 2))
        if not self._plan:
            grid.add_row("[dim]workers are starting[/dim]")
            return grid
        axes = list(self._plan["axes"].values())
        width = len(self._plan["members"]) // axes[0] if len(axes) > 1 else len(self._plan["members"])
        members = self._plan["members"]
        for first in range(0, len(members), width):
            row = members[first : first + width]
            grid.add_row(*(f"rank {m['rank']} · {self._plan['hosts'][str(m['node'])]} · pid {m['pid']}" for m in row))
        grid.add_row(f"[bold]mesh {_axes(self._plan['axes'])}[/bold]")
        return grid


def sparkline(values: list[float], width: int) -> str:
    """The last part of a curve in block characters; lower is lower."""
    values = values[-width * 4 :: max(1, min(4, len(values) // width))][-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    return "".join(BARS[int((value - low) / (high - low or 1) * (len(BARS) - 1))] for value in values)


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    """The table at the end."""
    console = Console()
    table = Table(title="What happened", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    recovery = summary["recovery_s"]
    rows = {
        "meshes, in order": "  →  ".join(_axes(axes) for axes in summary["meshes"]),
        "steps": str(summary["steps"]),
        "samples": (
            f"{summary['samples']} taken, {summary['samples_lost']} lost, {summary['samples_repeated']} repeated"
        ),
        "kill → next step": f"{recovery['total']:.2f} s  ({_phases(recovery)})",
        "newcomer → next step": f"{summary['growth_s']['total']:.2f} s  ({_phases(summary['growth_s'])})",
        "state from peers": f"{_size(summary['bytes_from_peers'])}; from disk {_size(summary['bytes_from_disk'])}",
        "survivors' processes": f"{summary['survivor_pids_before']} before, {summary['survivor_pids_after']} after",
        "loss against reference": (
            f"{summary['max_loss_difference']:.1e} at most (tolerance {summary['loss_tolerance']:.0e})"
        ),
        "whole demo": f"{summary['seconds']:.0f} s",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table)
    for promise, kept in summary["promises"].items():
        console.print(f"  {'[green]kept  [/green]' if kept else '[red]BROKEN[/red]'}  {promise}")
    console.print(f"\nreport: {folder / 'report.html'}   figures: {folder / 'summary.json'}", soft_wrap=True)


def _axes(axes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in axes.items())


def _phases(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if name != "total")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
