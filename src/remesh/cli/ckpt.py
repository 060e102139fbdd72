"""``remesh ckpt``: tools for checkpoints. One process, no accelerator, no process group, memory bounded by one band."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from remesh.checkpoint.checkpoint_errors import (
    CheckpointFormatError,
    CheckpointingException,
    CheckpointMismatchError,
    as_checkpoint_errors,
)
from remesh.checkpoint.formats.torch_format import check_files
from remesh.checkpoint.plan.manifest import StoredTensor
from remesh.checkpoint.run import safetensors
from remesh.checkpoint.run.conversion import Contents, Format, convert, gather_contents, merge, open_any
from remesh.checkpoint.run.housekeeping import (
    Decision,
    ListedCheckpoint,
    State,
    decide_removals,
    list_checkpoints,
    remove_checkpoint,
)
from remesh.checkpoint.run.metrics_file import check_is_known, read_metrics
from remesh.checkpoint.run.reader import OpenCheckpoint, open_checkpoint, why_incomplete
from remesh.checkpoint.run.stored_values import bands_of, compare, read_box, shape_of
from remesh.checkpoint.storage import Location, location_of, store_of
from remesh.checkpoint.storage.integrity import SHA256_FNAME, check_sha256_manifest, verify
from remesh.cli.ckpt_foreign import FROM_PROGRAM, TO_PROGRAM, convert_from, convert_to
from remesh.cli.ckpt_forms import form_of_checkpoint, form_of_decisions, form_of_listed, form_of_tensor
from remesh.cli.shown import JSON, print_json, print_table, progress_of_bytes, texts_of, with_progress
from remesh.foundation.errors import ConfigError
from remesh.foundation.exit_codes import ExitCode
from remesh.foundation.retention import KeepBest, KeepEvery, KeepLast, Policy
from remesh.layout import Box
from remesh.layout.from_torch import torch_dtype

_MAX_CELLS = 32
_MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_STYLE = {State.COMPLETE: "green", State.UNFINISHED: "yellow", State.DAMAGED: "red"}


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
    place = location_of(given)
    if not store_of(place).is_directory(place):
        raise click.BadParameter(f"no such directory: {place}", ctx, param)
    return place


@click.group()
def ckpt() -> None:
    """Inspect and edit checkpoints: list, show, diff, verify, convert, merge, export, clean up."""


@ckpt.command("ls", short_help="List the checkpoints under a folder.")
@click.argument("root", callback=_directory)
@JSON
def list_steps(root: Location, as_json: bool) -> None:
    """List the checkpoints under ROOT, directories named step-00000120, with the metrics they were saved with."""
    listed = list_checkpoints(root)
    rows = [_with_metrics(one) for one in listed]
    if as_json:
        print_json(rows)
        return
    names = sorted({name for row in rows for name in row["metrics"]})
    cells = []
    for one, row in zip(listed, rows, strict=True):
        state = Text(one.state.value, _STYLE[one.state])
        measured = [f"{row['metrics'][name]:g}" if name in row["metrics"] else "" for name in names]
        cells.append([str(one.step), one.directory.name, state, format_bytes(one.num_bytes), *measured])
    if cells:
        print_table(("step", "directory", "state", "size", *names), cells, lines=False)
    else:
        click.echo(_why_none(root))
    for one, row in zip(listed, rows, strict=True):
        if row["problem"] and one.state is not State.UNFINISHED:
            click.echo(f"{one.directory.name}: {row['problem']}", err=True)


def _why_none(root: Location) -> str:
    """What to print where no directory is named after a step; a checkpoint itself is a likely mistake."""
    if not why_incomplete(root):
        return f"{root} is a checkpoint itself: see remesh ckpt show {root}"
    return f"no checkpoints under {root}: expected directories named step-00000120"


def _with_metrics(one: ListedCheckpoint) -> dict[str, Any]:
    """A row of ``ls``; metrics that cannot be read are the problem of their row alone."""
    form = form_of_listed(one)
    try:
        return {**form, "metrics": read_metrics(one.directory)}
    except CheckpointFormatError as raised:
        return {**form, "problem": str(raised), "metrics": {}}


@ckpt.command(short_help="Show what a checkpoint holds.")
@click.argument("directory", callback=_source)
@click.argument("key", required=False)
@click.option("--values", is_flag=True, help="With KEY: also show its values, shortened.")
@click.option("--cut", is_flag=True, help="Without KEY: draw how each tensor is sharded.")
@JSON
def show(directory: Location, key: str | None, values: bool, cut: bool, as_json: bool) -> None:
    """Show what checkpoint DIRECTORY holds; with KEY, how that tensor is sharded."""
    checkpoint = _open_to_show(directory)
    if as_json:
        of_key = None if key is None else form_of_tensor(key, _tensor(checkpoint, key))
        if of_key is not None and values:
            of_key["values"] = read_box(checkpoint, of_key["name"]).tolist()
        print_json(form_of_checkpoint(checkpoint) if of_key is None else of_key)
        return
    if key is None:
        _show_all(checkpoint)
        for name, stored in checkpoint.manifest.tensors.items() if cut else ():
            _show_cut(name, stored)
        return
    _show_cut(key, _tensor(checkpoint, key))
    if values:
        _console().print(str(read_box(checkpoint, key)), markup=False)


def _open_to_show(directory: Location) -> OpenCheckpoint:
    try:
        return open_any(directory)
    except CheckpointingException:
        path = Path(str(directory))
        if not path.is_file():
            raise
        raise ConfigError(
            f"showing a checkpoint: {directory} is a file of {path.stat().st_size} bytes, expected the folder of a "
            f"checkpoint, or a safetensors file; if it is a part of one give its folder, {path.absolute().parent}"
        ) from None


@ckpt.command(short_help="Compare two checkpoints by value.")
@click.argument("left", callback=_source)
@click.argument("right", callback=_source)
@JSON
def diff(left: Location, right: Location, as_json: bool) -> None:
    """Compare the tensors of two checkpoints by value, however each is sharded. Exit code 1 if they differ."""
    one, other = (open_any(path) for path in (left, right))
    keys, theirs = set(one.manifest.tensors), set(other.manifest.tensors)
    differing: dict[str, str] = {}
    console = Console(soft_wrap=True, highlight=False, quiet=as_json)
    for key in sorted(keys - theirs):
        console.print(f"only in {left}: {key}", markup=False)
    for key in sorted(theirs - keys):
        console.print(f"only in {right}: {key}", markup=False)
    with progress_of_bytes() as progress, as_checkpoint_errors(f"comparing {left} and {right}"):
        task = progress.add_task("comparing", total=sum(_bytes_of(one.manifest.tensors[key]) for key in keys & theirs))
        for key in sorted(keys & theirs):
            if (found := compare(one, other, key)) is not None:
                differing[key] = found.what
                if not as_json:
                    progress.console.print(f"{key}: {found.what}", markup=False)
            progress.advance(task, _bytes_of(one.manifest.tensors[key]))
    num_differing = len(keys ^ theirs) + len(differing)
    console.print(f"{num_differing} differ" if num_differing else f"the {len(keys)} tensors are equal")
    if as_json:
        only = {"only_in_left": sorted(keys - theirs), "only_in_right": sorted(theirs - keys)}
        print_json({"equal": not num_differing, **only, "differing": differing})
    sys.exit(ExitCode.FAILED if num_differing else ExitCode.OK)


@ckpt.command("verify", short_help="Check a checkpoint against its checksums.")
@click.argument("directory", callback=_directory)
@JSON
def run_verify(directory: Location, as_json: bool) -> None:
    """Read all of checkpoint DIRECTORY and check it against its checksums."""
    checkpoint = open_checkpoint(directory, allow_native=True, with_stand_ins=True)
    check_files(directory, list(checkpoint.manifest.extents()))
    checksums = checkpoint.checksums
    with progress_of_bytes() as progress, as_checkpoint_errors(f"verifying checkpoint {directory}"):
        task = progress.add_task("verifying", total=sum(entry.num_bytes for entry in checksums.entries.values()))
        for _, num_bytes in verify(directory):
            progress.advance(task, num_bytes)
        if not checksums.entries:
            _read_everything(checkpoint, progress)
    if store_of(directory).size_of(directory / SHA256_FNAME) is not None:
        check_sha256_manifest(directory)
    if as_json:
        print_json({"ok": True, "num_files": len(checksums.entries), "has_checksums": bool(checksums.entries)})
        return
    what = f"{len(checksums.entries)} files as they were written" if checksums.entries else "everything can be read"
    _console().print(f"[green]ok[/]: {what}")


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
def gc(
    root: Location,
    keep_last: int | None,
    keep_every: int | None,
    keep_smallest: Sequence[str],
    keep_largest: Sequence[str],
    yes: bool,
    as_json: bool,
) -> None:
    """Remove aborted saves under ROOT; with any --keep option also the checkpoints that none of them keeps.

    The newest checkpoint always stays. Metrics are those that `remesh.Checkpoints` has saved.
    """
    policies: list[Policy] = [KeepLast(keep_last)] if keep_last else []
    policies += [KeepEvery(keep_every)] if keep_every else []
    best = [KeepBest(name, 1) for name in keep_smallest] + [KeepBest(name, 1, largest=True) for name in keep_largest]
    found = list_checkpoints(root)
    metrics = {one.step: read_metrics(one.directory) for one in found if best and one.state is State.COMPLETE}
    for policy in best:
        check_is_known(policy.metric, metrics.values(), f"removing old checkpoints under {root}")
    decisions = decide_removals(found, [*policies, *best], metrics)
    removed = [one.found for one in decisions if one.removes]
    if not as_json:
        _show_decisions(decisions)
    left: list[Location] = []
    failed: dict[Location, str] = {}
    for one in with_progress(removed if yes else [], "removing"):
        try:
            left += remove_checkpoint(one.directory)
        except CheckpointingException as raised:
            failed[one.directory] = str(raised)
    freed = sum(one.num_bytes for one in removed if one.directory not in failed)
    if as_json:
        summary = {"left": left, "failed": dict(zip(map(str, failed), failed.values(), strict=True))}
        print_json({"removed": yes, "bytes": freed, **summary, "decisions": form_of_decisions(decisions)})
    else:
        for path in left:
            click.echo(f"left in place, not written by a save: {path}")
        click.echo(f"{format_bytes(freed)} {'freed' if yes else 'would be freed; give --yes to remove'}")
    for problem in failed.values():
        click.echo(problem, err=True)
    sys.exit(ExitCode.FAILED if failed else ExitCode.OK)


@ckpt.command(short_help="Write the tensors as safetensors files.")
@click.argument("directory", callback=_directory)
@click.argument("target", callback=_place)
@click.option(
    "--max-file-bytes",
    type=click.IntRange(1),
    default=4 << 30,
    show_default=True,
    help="Largest size of each file, in bytes.",
)
@click.option("--prefix", default="", help="Export only the tensors under this prefix, without it.")
def export(directory: Location, target: Location, max_file_bytes: int, prefix: str) -> None:
    """Write the tensors of checkpoint DIRECTORY to TARGET as safetensors files with an index."""
    checkpoint = open_any(directory)
    kept = [key for key in checkpoint.manifest.tensors if key.startswith(prefix)]
    if not kept:
        raise CheckpointMismatchError(
            f"exporting {directory}: no tensor has the prefix {prefix!r}; see remesh ckpt show"
        )
    with progress_of_bytes() as progress:
        task = progress.add_task("exporting", total=sum(_bytes_of(checkpoint.manifest.tensors[key]) for key in kept))
        files = safetensors.export(
            checkpoint,
            target,
            max_file_bytes=max_file_bytes,
            rename=lambda key: key.removeprefix(prefix) if key.startswith(prefix) else None,
            on_bytes=lambda num_bytes: progress.advance(task, num_bytes),
        )
    click.echo(f"{len(kept)} tensors in {len(files)} files in {target}")


_FORMATS = click.Choice([one.value for one in Format])
_MAX_FILE_BYTES = click.option(
    "--max-file-bytes",
    type=click.IntRange(1),
    default=4 << 30,
    show_default=True,
    help="Largest size of each file, in bytes.",
)


@ckpt.command("convert", short_help="Write a checkpoint in another format.")
@click.argument("source", callback=_source)
@click.argument("target", callback=_place)
@click.option("--to", "to", type=click.Choice([*_FORMATS.choices, *TO_PROGRAM]), required=True, help="Format to write.")
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
def run_convert(
    source: Location,
    target: Location,
    to: str,
    origin: str | None,
    tensor_parallel: int | None,
    pipeline_parallel: int | None,
    max_file_bytes: int,
) -> None:
    """Write checkpoint SOURCE, of any format, to TARGET in another format; shards stay as they are."""
    if to != "megatron-legacy" and (tensor_parallel or pipeline_parallel):
        raise click.UsageError(
            f"--tensor-parallel and --pipeline-parallel are of --to megatron-legacy, found --to {to}"
        )
    if origin is not None:
        click.echo(convert_from(source, target, to, origin))
    elif to in TO_PROGRAM:
        click.echo(convert_to(source, target, to, tensor_parallel, pipeline_parallel))
    else:
        _write(gather_contents([open_any(source)]), target, Format(to), max_file_bytes)


@ckpt.command("merge", short_help="Merge several checkpoints into one, unsharded.")
@click.argument("sources", nargs=-1, required=True, callback=_sources)
@click.argument("target", callback=_place)
@click.option("--to", "to", type=_FORMATS, default="torch_dist", show_default=True, help="Format to write.")
@_MAX_FILE_BYTES
def run_merge(sources: Sequence[Location], target: Location, to: str, max_file_bytes: int) -> None:
    """Merge checkpoints SOURCES into one checkpoint TARGET, with every tensor in one shard."""
    _write(merge(gather_contents([open_any(source) for source in sources])), target, Format(to), max_file_bytes)


def _write(contents: Contents, target: Location, to: Format, max_file_bytes: int) -> None:
    with progress_of_bytes() as progress:
        task = progress.add_task("writing", total=contents.num_bytes)
        done = convert(
            contents,
            target,
            to,
            max_file_bytes=max_file_bytes,
            on_bytes=lambda num_bytes: progress.advance(task, num_bytes),
        )
    objects = f", {done.num_objects} objects" if done.num_objects else ""
    common = " and the common data" if done.has_common else ""
    click.echo(
        f"{done.num_tensors} tensors, {format_bytes(contents.num_bytes)}{objects}{common} in {target}, as {to.value}"
    )
    if done.left_out:
        click.echo(f"left out, since {to.value} has no place for them: {done.left_out}")


def draw_cut(stored: StoredTensor) -> list[str]:
    """The chunks of a tensor as cells, a letter for each; of more than two dims only the last two are drawn.

    Each cell stands for an equal part of the tensor and shows the chunk that holds its first element.
    """
    shape = stored.global_shape[-2:]
    if not shape or 0 in stored.global_shape:
        return []
    num_rows, num_columns = (min(_MAX_CELLS, size) for size in ((1, *shape) if len(shape) == 1 else shape))
    lead = (0,) * (len(stored.global_shape) - len(shape))
    lines = []
    for row in range(num_rows):
        line = ""
        for column in range(num_columns):
            at = (
                *lead,
                *(n * size // cells for n, size, cells in _axes(shape, (row, num_rows), (column, num_columns))),
            )
            here = Box.at(at, (1,) * len(at))
            found = zip(_marks(len(stored.chunks)), stored.chunks, strict=True)
            line += next((mark for mark, chunk in found if chunk.box.contains(here)), ".") + " "
        lines.append(line.rstrip())
    return lines


def format_bytes(num_bytes: float) -> str:
    """A number of bytes for people.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _axes(shape: Sequence[int], *axes: tuple[int, int]) -> list[tuple[int, int, int]]:
    used = axes[-len(shape) :]
    return [(at, size, cells) for (at, cells), size in zip(used, shape, strict=True)]


def _marks(count: int) -> list[str]:
    return [_MARKS[index % len(_MARKS)] for index in range(count)]


def _show_all(checkpoint: OpenCheckpoint) -> None:
    cells = []
    total = 0
    for key, stored in checkpoint.manifest.tensors.items():
        num_files = len({chunk.extent.file for chunk in stored.chunks})
        num_bytes = _bytes_of(stored)
        total += num_bytes
        shape = " x ".join(map(str, stored.global_shape)) or "scalar"
        cells.append([key, stored.dtype, shape, str(len(stored.chunks)), str(num_files), format_bytes(num_bytes)])
    console = _console()
    if cells:
        print_table(("tensor", "dtype", "shape", "chunks", "files", "size"), cells, lines=False)
    for name, extent in checkpoint.manifest.objects.items():
        console.print(f"object {name}  {extent}", markup=False)
    for key, value in zip(texts_of(checkpoint.common), checkpoint.common.values(), strict=True):
        console.print(f"common {key} = {_shortened(value)}", markup=False)
    num_tensors = len(checkpoint.manifest.tensors)
    console.print(f"{num_tensors} tensor{'' if num_tensors == 1 else 's'}, {format_bytes(total)}")


def _show_cut(key: str, stored: StoredTensor) -> None:
    console = _console()
    console.print(f"{key}: {stored.dtype} {list(stored.global_shape)}, {format_bytes(_bytes_of(stored))}", markup=False)
    for mark, chunk in zip(_marks(len(stored.chunks)), stored.chunks, strict=True):
        console.print(f"  {mark}  {chunk.box}  {chunk.extent}", markup=False)
    for line in draw_cut(stored):
        console.print(f"  {line}", markup=False)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _read_everything(checkpoint: OpenCheckpoint, progress: Progress) -> None:
    tensors = checkpoint.manifest.tensors
    task = progress.add_task("reading", total=sum(map(_bytes_of, tensors.values())))
    for key, stored in tensors.items():
        for box in bands_of(stored.dtype, shape_of(checkpoint, key)):
            read_box(checkpoint, key, box)
            progress.advance(task, box.size * torch_dtype(stored.dtype).itemsize)


def _show_decisions(decisions: Sequence[Decision]) -> None:
    cells = []
    for one in decisions:
        act = Text("remove", "red") if one.removes else Text("keep", "green")
        cells.append([one.found.directory.name, act, one.reason, format_bytes(one.found.num_bytes)])
    if cells:
        print_table(("directory", "", "why", "size"), cells, lines=False)


def _tensor(checkpoint: OpenCheckpoint, key: str) -> StoredTensor:
    found = checkpoint.manifest.tensors.get(key)
    if found is None:
        raise CheckpointMismatchError(
            f"showing tensor {key!r} of {checkpoint.directory}: it is not there, expected one of "
            f"{sorted(checkpoint.manifest.tensors)[:5]}; remesh ckpt show {checkpoint.directory} lists all"
        )
    return found


def _bytes_of(stored: StoredTensor) -> int:
    return math.prod(stored.global_shape) * torch_dtype(stored.dtype).itemsize


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False)
