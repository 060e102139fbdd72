"""Work of the verbs of ``remesh ckpt``, each a function with the name and the arguments of its line in `ckpt`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
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
from remesh.checkpoint.storage import Location, store_of
from remesh.checkpoint.storage.checked_file import verify
from remesh.checkpoint.storage.integrity import SHA256_FNAME, check_sha256_manifest
from remesh.cli.ckpt_foreign import convert_from, convert_to
from remesh.cli.ckpt_forms import form_of_checkpoint, form_of_decisions, form_of_listed, form_of_tensor
from remesh.cli.shown import print_json, print_table, progress_of_bytes, say, say_text, texts_of, with_progress
from remesh.foundation.errors import ConfigError
from remesh.foundation.exit_codes import ExitCode
from remesh.foundation.retention import KeepBest, KeepEvery, KeepLast, Policy
from remesh.layout import Box
from remesh.layout.from_torch import torch_dtype

_MAX_CELLS = 32
_MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_STYLE = {State.COMPLETE: "green", State.UNFINISHED: "yellow", State.DAMAGED: "red"}


def list_steps(root: Location, as_json: bool) -> None:
    """List the checkpoints under a folder."""
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
        say(_why_none(root))
    for one, row in zip(listed, rows, strict=True):
        if row["problem"] and one.state is not State.UNFINISHED:
            say(f"{one.directory.name}: {row['problem']}", err=True)


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


def show(directory: Location, key: str | None, values: bool, cut: bool, as_json: bool) -> None:
    """Show a checkpoint, or one of its tensors."""
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
        say_text(str(read_box(checkpoint, key)))


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


def diff(left: Location, right: Location, as_json: bool) -> None:
    """Compare the tensors of two checkpoints."""
    one, other = (open_any(path) for path in (left, right))
    keys, theirs = set(one.manifest.tensors), set(other.manifest.tensors)
    differing: dict[str, str] = {}
    if not as_json:
        say(*(f"only in {left}: {key}" for key in sorted(keys - theirs)))
        say(*(f"only in {right}: {key}" for key in sorted(theirs - keys)))
    with progress_of_bytes() as progress, as_checkpoint_errors(f"comparing {left} and {right}"):
        task = progress.add_task("comparing", total=sum(_bytes_of(one.manifest.tensors[key]) for key in keys & theirs))
        for key in sorted(keys & theirs):
            if (found := compare(one, other, key)) is not None:
                differing[key] = found.what
            progress.advance(task, _bytes_of(one.manifest.tensors[key]))
    num_differing = len(keys ^ theirs) + len(differing)
    if not as_json:
        say(*(f"{key}: {what}" for key, what in differing.items()))
        say(f"{num_differing} differ" if num_differing else f"the {len(keys)} tensors are equal")
    else:
        only = {"only_in_left": sorted(keys - theirs), "only_in_right": sorted(theirs - keys)}
        print_json({"equal": not num_differing, **only, "differing": differing})
    sys.exit(ExitCode.FAILED if num_differing else ExitCode.OK)


def run_verify(directory: Location, as_json: bool) -> None:
    """Check a checkpoint against its checksums."""
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
    say(f"ok: {what}")


def gc(
    root: Location,
    keep_last: int | None,
    keep_every: int | None,
    keep_smallest: Sequence[str],
    keep_largest: Sequence[str],
    yes: bool,
    as_json: bool,
) -> None:
    """Remove aborted saves, and what no policy keeps."""
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
            say(f"left in place, not written by a save: {path}")
        say(f"{format_bytes(freed)} {'freed' if yes else 'would be freed; give --yes to remove'}")
    for problem in failed.values():
        say(problem, err=True)
    sys.exit(ExitCode.FAILED if failed else ExitCode.OK)


def export(directory: Location, target: Location, max_file_bytes: int, prefix: str) -> None:
    """Write the tensors as safetensors files."""
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
    say(f"{len(kept)} tensors in {len(files)} files in {target}")


def run_convert(
    source: Location,
    target: Location,
    to: str,
    origin: str | None,
    tensor_parallel: int | None,
    pipeline_parallel: int | None,
    max_file_bytes: int,
) -> None:
    """Write a checkpoint in another format."""
    if to != "megatron-legacy" and (tensor_parallel or pipeline_parallel):
        raise click.UsageError(
            f"--tensor-parallel and --pipeline-parallel are of --to megatron-legacy, found --to {to}"
        )
    if origin is not None:
        say(convert_from(source, target, to, origin))
    elif to in {one.value for one in Format}:
        _write(gather_contents([open_any(source)]), target, Format(to), max_file_bytes)
    else:
        say_text(convert_to(source, target, to, tensor_parallel, pipeline_parallel))


def run_merge(sources: Sequence[Location], target: Location, to: str, max_file_bytes: int) -> None:
    """Merge checkpoints into one."""
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
    say(f"{done.num_tensors} tensors, {format_bytes(contents.num_bytes)}{objects}{common} in {target}, as {to.value}")
    if done.left_out:
        say(f"left out, since {to.value} has no place for them: {done.left_out}")


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
    if cells:
        print_table(("tensor", "dtype", "shape", "chunks", "files", "size"), cells, lines=False)
    for name, extent in checkpoint.manifest.objects.items():
        say(f"object {name}  {extent}")
    for key, value in zip(texts_of(checkpoint.common), checkpoint.common.values(), strict=True):
        say(f"common {key} = {_shortened(value)}")
    num_tensors = len(checkpoint.manifest.tensors)
    say(f"{num_tensors} tensor{'' if num_tensors == 1 else 's'}, {format_bytes(total)}")


def _show_cut(key: str, stored: StoredTensor) -> None:
    say(f"{key}: {stored.dtype} {list(stored.global_shape)}, {format_bytes(_bytes_of(stored))}")
    for mark, chunk in zip(_marks(len(stored.chunks)), stored.chunks, strict=True):
        say(f"  {mark}  {chunk.box}  {chunk.extent}")
    say(*(f"  {line}" for line in draw_cut(stored)))


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
