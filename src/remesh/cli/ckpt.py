"""Command lines of ``remesh ckpt``: one process, no accelerator, no process group, memory bounded by one band.

Help, completion and a wrong line load no torch: what a verb does is a function of its name in `remesh.cli.ckpt_verbs`,
which is imported when the line is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import click

from remesh.checkpoint.storage import Location, location_of, store_of
from remesh.cli.shown import JSON
from remesh.foundation.first_use import import_home

FORMATS = ("torch_dist", "zarr", "safetensors", "dcp")
"""Values of `remesh.checkpoint.run.conversion.Format`, whose module loads torch."""
FROM_PROGRAM = ("deepspeed-zero", "megatron-legacy")
TO_PROGRAM = ("deepspeed-universal", "megatron-legacy")


def _place(ctx: click.Context, param: click.Parameter, given: str) -> Location:
    """The location that an argument names: a path, or a URL of any store."""
    return location_of(given)


def _source(ctx: click.Context, param: click.Parameter, given: str) -> Location:
    """The same, of a directory or a file that is there."""
    place = location_of(given)
    if not store_of(place).is_directory(place) and store_of(place).size_of(place) is None:
        raise click.BadParameter(f"no such directory or file: {place}", ctx, param)
    return place


def _sources(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> list[Location]:
    return [_source(ctx, param, one) for one in given]


def _directory(ctx: click.Context, param: click.Parameter, given: str) -> Location:
    """The same, of a directory that is there."""
    place = _source(ctx, param, given)
    if not store_of(place).is_directory(place):
        raise click.BadParameter(f"{place} is a file, expected a directory", ctx, param)
    return place


def _of_verbs(line: Callable[..., None]) -> Callable[..., None]:
    """The function of this name in `ckpt_verbs`, imported when it is called."""

    @functools.wraps(line)
    def call(**values: Any) -> None:
        getattr(import_home("remesh.cli.ckpt_verbs", "starting remesh ckpt"), line.__name__)(**values)

    return call


@click.group()
def ckpt() -> None:
    """Inspect and edit checkpoints: list, show, diff, verify, convert, merge, export, clean up."""


@ckpt.command("ls", short_help="List the checkpoints under a folder.")
@click.argument("root", callback=_directory)
@JSON
@_of_verbs
def list_steps(**values: Any) -> None:
    """List the checkpoints under ROOT, directories named step-00000120, with the metrics they were saved with."""


@ckpt.command(short_help="Show what a checkpoint holds.")
@click.argument("directory", callback=_source)
@click.argument("key", required=False)
@click.option("--values", is_flag=True, help="With KEY: also show its values, shortened.")
@click.option("--cut", is_flag=True, help="Without KEY: draw how each tensor is sharded.")
@JSON
@_of_verbs
def show(**values: Any) -> None:
    """Show what checkpoint DIRECTORY holds; with KEY, how that tensor is sharded."""


@ckpt.command(short_help="Compare two checkpoints by value.")
@click.argument("left", callback=_source)
@click.argument("right", callback=_source)
@JSON
@_of_verbs
def diff(**values: Any) -> None:
    """Compare the tensors of two checkpoints by value, however each is sharded. Exit code 1 if they differ."""


@ckpt.command("verify", short_help="Check a checkpoint against its checksums.")
@click.argument("directory", callback=_directory)
@JSON
@_of_verbs
def run_verify(**values: Any) -> None:
    """Read all of checkpoint DIRECTORY and check it against its checksums."""


@ckpt.command(short_help="Remove aborted saves and old checkpoints.")
@click.argument("root", callback=_directory)
@click.option("--keep-last", type=click.IntRange(1), help="Keep this many of the highest steps.")
@click.option(
    "--keep-every", type=click.IntRange(1), help="Keep the first checkpoint of each interval of this many steps."
)
@click.option(
    "--keep-smallest", multiple=True, metavar="METRIC", help="Keep the checkpoint with the smallest value of a metric."
)
@click.option(
    "--keep-largest", multiple=True, metavar="METRIC", help="Keep the checkpoint with the largest value of a metric."
)
@click.option("--yes", is_flag=True, help="Remove; without this option, only print what would be removed.")
@JSON
@_of_verbs
def gc(**values: Any) -> None:
    """Remove aborted saves under ROOT; with any --keep option also the checkpoints that none of them keeps.

    The newest checkpoint always stays. Metrics are those that `remesh.Checkpoints` has saved.
    """


_MAX_FILE_BYTES = click.option(
    "--max-file-bytes",
    type=click.IntRange(1),
    default=4 << 30,
    show_default=True,
    help="Largest size of each file, in bytes.",
)


@ckpt.command(short_help="Write the tensors as safetensors files.")
@click.argument("directory", callback=_directory)
@click.argument("target", callback=_place)
@_MAX_FILE_BYTES
@click.option("--prefix", default="", help="Export only the tensors under this prefix, without it.")
@_of_verbs
def export(**values: Any) -> None:
    """Write the tensors of checkpoint DIRECTORY to TARGET as safetensors files with an index."""


@ckpt.command("convert", short_help="Write a checkpoint in another format.")
@click.argument("source", callback=_source)
@click.argument("target", callback=_place)
@click.option("--to", "to", type=click.Choice([*FORMATS, *TO_PROGRAM]), required=True, help="Format to write.")
@click.option(
    "--from",
    "origin",
    type=click.Choice(FROM_PROGRAM),
    help="The program that wrote SOURCE, if its files do not name their format.",
)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(1),
    help="Ranks of tensor parallelism that --to megatron-legacy is for; as saved, if not given.",
)
@click.option(
    "--pipeline-parallel",
    type=click.IntRange(1),
    help="Ranks of the pipeline that --to megatron-legacy is for; as saved, if not given.",
)
@_MAX_FILE_BYTES
@_of_verbs
def run_convert(**values: Any) -> None:
    """Write checkpoint SOURCE, of any format, to TARGET in another format; shards stay as they are."""


@ckpt.command("merge", short_help="Merge several checkpoints into one, unsharded.")
@click.argument("sources", nargs=-1, required=True, callback=_sources)
@click.argument("target", callback=_place)
@click.option(
    "--to", "to", type=click.Choice(FORMATS), default="torch_dist", show_default=True, help="Format to write."
)
@_MAX_FILE_BYTES
@_of_verbs
def run_merge(**values: Any) -> None:
    """Merge checkpoints SOURCES into one checkpoint TARGET, with every tensor in one shard."""
