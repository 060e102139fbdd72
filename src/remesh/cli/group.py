"""What can ``remesh`` do? The table of verbs, and the group that loads only the one it runs."""

from __future__ import annotations

import importlib
from typing import Any

import click

from remesh.cli.quiet import import_quietly
from remesh.errors import Error
from remesh.first_use import import_home

_VERBS = {
    "ckpt": "Look into checkpoints: list, show, compare, verify, convert, merge, export, clear away.",
    "dashboard": "Serve a page that shows what a job is doing.",
    "mpi": "Carry MPI programs to another MPI, network and placement.",
    "net": "Measure the network between hosts.",
    "pipeline": "Draw, compare and search pipeline schedules.",
    "plan": "Plan a move between two layouts: bound, ratio, rounds, pictures.",
    "run": "Start a script on this node as part of an elastic job.",
    "testbed": "Make hosts on this machine, with shaped links.",
    "torch": "Carry torch.distributed programs that know nothing of it through checkpoints and restarts.",
    "top": "Show in the terminal what a job is doing.",
}
"""Verb to its line in ``remesh --help``. The command of the same name lives in ``remesh.cli.<verb>``."""


class LazyGroup(click.Group):
    """A group whose commands are imported by name; help needs none of them, and so no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        load = import_quietly if cmd_name == "run" else importlib.import_module
        home = import_home(f"remesh.cli.{cmd_name}", f"starting remesh {cmd_name}", load)
        command: click.Command = getattr(home, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_VERBS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """An error that we raise on purpose says all there is to say: its text, no traceback, exit code 1."""
        try:
            return super().invoke(ctx)
        except Error as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="remesh", prog_name="remesh")
def main() -> None:
    """Carry the state of a running distributed job from any mesh to any other."""
