"""``remesh top``: what a job is doing, in the terminal."""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.live import Live

from remesh.cli.events_folder import check_folder, describe_empty, title_of
from remesh.cli.shown import JSON, console, print_json, say
from remesh.dashboard.story import Story
from remesh.dashboard.terminal import render
from remesh.elasticity.telemetry.events import EventReader


@click.command()
@click.argument("events_dir", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print the current state once, and exit.")
@JSON
@click.option("--every", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between updates.")
def top(events_dir: Path, once: bool, as_json: bool, every: float) -> None:
    """Show the job that writes its events into EVENTS_DIR, until it ends or Ctrl-C. --json implies --once."""
    check_folder(events_dir)
    reader, story, title = EventReader(events_dir), Story(), title_of(events_dir)
    screen = console()

    def look() -> None:
        for event in reader.poll():
            story.take(event)

    if hint := describe_empty(events_dir):
        say(f"remesh top: {hint}", err=True)
    look()
    if as_json:
        print_json({"job": title, **story.to_json()})
        return
    if once:
        screen.print(render(story, title))
        return
    with Live(render(story, title), console=screen, auto_refresh=False) as live:
        while story.state not in ("ended", "failed"):
            time.sleep(every)
            look()
            live.update(render(story, title), refresh=True)
