"""Table of the command's verbs, and the Click group that imports only the one it runs."""

from __future__ import annotations

import difflib
import importlib
import io
import sys
from typing import Any

import click

from remesh.cli.quiet import import_quietly
from remesh.foundation.errors import ConfigError, Error, LayoutError, PlanError
from remesh.foundation.exit_codes import ExitCode
from remesh.foundation.first_use import import_home
from remesh.foundation.visible_text import visible
from remesh.version import __version__

_VERBS = {
    "ckpt": "Inspect and edit checkpoints: list, show, diff, verify, convert, merge, export, clean up.",
    "dashboard": "Serve a web page that shows the state of a job.",
    "mpi": "Checkpoint unmodified MPI programs; restart them under any MPI library and network.",
    "net": "Measure the network between hosts.",
    "pipeline": "Draw, compare and search pipeline schedules.",
    "plan": "Plan a transfer between two layouts: its time, lower bound, messages, pictures.",
    "run": "Start a script on this node as part of an elastic job.",
    "testbed": "Simulate hosts on this machine, as network namespaces with shaped links.",
    "torch": "Checkpoint unmodified torch.distributed programs; restart them elsewhere.",
    "top": "Show the state of a job in the terminal.",
}
"""Verb to its line in ``remesh --help``. The command of the same name lives in ``remesh.cli.<verb>``."""


_WRONG_CALLS = (ConfigError, LayoutError, PlanError)
"""Errors that the person who typed the command must mend, in what was typed or in a file that it names."""


class _WrongCall(click.ClickException):
    exit_code = ExitCode.USAGE


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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, which suggests verbs only of those that are imported."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as raised:
            if not (near := difflib.get_close_matches(args[0], _VERBS)):
                raise
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {' or '.join(near)}?", ctx) from raised

    def invoke(self, ctx: click.Context) -> Any:
        """Print an error that we raise on purpose as its text, without a traceback; exit code 2 for a wrong call."""
        try:
            return super().invoke(ctx)
        except Error as error:
            message = "\n".join(map(visible, str(error).split("\n")))
            if isinstance(error, _WRONG_CALLS):
                raise _WrongCall(message) from error
            raise click.ClickException(message) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="remesh")
def main() -> None:
    """Carry the state of a running distributed job from any mesh to any other."""
    # Names of files, and texts out of files that any program may have written, may not fit the terminal's encoding.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
