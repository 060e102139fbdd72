"""Command-line options of jobs: on which hosts one runs, when it is saved, from what it continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from remesh.carried.images.form.kinds import OpenFilePolicy

Option = Callable[[Any], Any]

JOB = click.option(
    "--job", "job_path", type=click.Path(path_type=Path),
    help="Folder of the job, on a file system that all hosts share; by default a new one in ./remesh-jobs or in "
    "$REMESH_JOBS.",
)  # fmt: skip
HOSTS = (
    click.option("--hosts", help="Hosts as NAME or NAME:RANKS, separated by commas; this host if left out."),
    click.option("--testbed", metavar="RATE", help="Make the hosts on this machine, with links of this rate."),
)
CHECKPOINTS = (
    click.option("--every", "every_s", type=click.FloatRange(0.1),
                 help="Seconds between checkpoints; by default they are taken on request only."),
    click.option("--keep", type=click.IntRange(1), default=2, show_default=True, help="Checkpoints to keep."),
    click.option("--incremental", is_flag=True, help="Write only memory changed since the last checkpoint."),
    click.option("--compress", is_flag=True, help="Compress the process images."),
    click.option("--round-limit", "round_limit_s", type=click.FloatRange(0.1), default=60.0, show_default=True,
                 help="Seconds after which a checkpoint that finds no consistent state is given up for now."),
)  # fmt: skip
MAX_RESTARTS = click.option(
    "--max-restarts", "--max_restarts", type=click.IntRange(0), default=0, show_default=True,
    help="How often the job continues by itself from its newest checkpoint when a rank or a host is lost or a program "
    "fails.",
)  # fmt: skip
RESTART = (
    click.option("--checkpoint", "number", type=int, help="Number of the checkpoint; the newest one if left out."),
    click.option("--open-files", type=click.Choice([policy.value for policy in OpenFilePolicy]),
                 default=OpenFilePolicy.TRUNCATE.value, show_default=True,
                 help="What to do with files open for writing that have changed since the checkpoint: truncate them to "
                 "their length at the checkpoint, keep what was appended, refuse the restart, or leave them (rewrite) "
                 "to a program that writes them again without reading them."),
)  # fmt: skip


def with_options(*options: Option) -> Option:
    """A decorator that adds these options to a verb, in this order of ``--help``."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add
