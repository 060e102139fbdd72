"""Export into Hugging Face's ``*.safetensors`` files, and loads from them, by one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointMismatchError, as_checkpoint_errors
from remesh.checkpoint.formats.safetensors_format import (
    FORMAT,
    MAX_FILE_BYTES,
    BandedTensor,
    is_safetensors,
    read_safetensors_manifest,
    write_tensors,
)
from remesh.checkpoint.run.reader import OpenCheckpoint, fill_tensors, plan_fill
from remesh.checkpoint.run.stored_values import read_bands, shape_of
from remesh.checkpoint.storage import Directory, Location, location_of
from remesh.checkpoint.storage.integrity import Checksums
from remesh.checkpoint.values.entities import ShardedTensor


def banded(checkpoint: OpenCheckpoint, key: str) -> BandedTensor:
    """A stored tensor, to be written."""
    dtype = checkpoint.manifest.tensors[key].dtype
    return BandedTensor(dtype, shape_of(checkpoint, key), partial(read_bands, checkpoint, key))


def export(
    checkpoint: OpenCheckpoint,
    target: Location,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    rename: Callable[[str], str | None] = str,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, list[str]]:
    """Write the tensors of a checkpoint into directory ``target``, which must hold no export yet; one process.

    ``rename`` gives the name of each tensor in the export, None for one to be left out. The index, or the only file,
    comes last. Objects and common data have no place in this format. Returns the names in each file.
    """
    with as_checkpoint_errors(f"exporting checkpoint {checkpoint.directory} to {target}"):
        key_of: dict[str, str] = {}
        for key in checkpoint.manifest.tensors:
            name = rename(key)
            if name is None:
                continue
            if name in key_of:
                raise CheckpointMismatchError(
                    f"exporting checkpoint {checkpoint.directory}: tensors {key_of[name]!r} and {key!r} would "
                    f"both be called {name!r}, expected one tensor per name; rename them otherwise"
                )
            key_of[name] = key
        sources = {name: banded(checkpoint, key) for name, key in key_of.items()}
        return write_tensors(sources, target, max_file_bytes, on_bytes)


def open_safetensors(source: Directory) -> OpenCheckpoint:
    """A file, or a directory of files with or without an index, to be read like a checkpoint without common data."""
    place = location_of(source)
    with as_checkpoint_errors(f"opening safetensors {place}"):
        directory, manifest = read_safetensors_manifest(place)
        return OpenCheckpoint(Checksums(directory, {}), manifest, {}, FORMAT)


def open_safetensors_after(raised: CheckpointFormatError, place: Location) -> OpenCheckpoint:
    """What Hugging Face has written, where there was no sign of a checkpoint; else raises the error of that look."""
    if raised.reason != "not-a-checkpoint" or not is_safetensors(place):
        raise raised
    return open_safetensors(place)


def load_safetensors(tensors: Sequence[ShardedTensor], source: Directory) -> None:
    """Fill the data of every sharded tensor from a file, or a directory of files; values are cast to its dtype.

    Reads the boxes that are wanted, no more. Raises `CheckpointMismatchError` for what is not there or has another
    shape, before any tensor is changed.
    """
    with as_checkpoint_errors(f"loading safetensors from {source}"):
        checkpoint = open_safetensors(source)
        fill_tensors(checkpoint, plan_fill(checkpoint, tensors))
