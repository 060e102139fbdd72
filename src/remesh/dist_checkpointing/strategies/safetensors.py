"""The format of Hugging Face: ``*.safetensors`` files and an index that says which tensor is in which file.

Exporting needs memory for one output file. Reading takes only the boxes that are wanted out of each file. Both go
through the library safetensors, which this module needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from remesh.dist_checkpointing.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointPathError,
    told_as_checkpoint_errors,
)
from remesh.dist_checkpointing.mapping import ShardedTensor
from remesh.dist_checkpointing.reader import OpenCheckpoint
from remesh.dist_checkpointing.storage import Location, store_of
from remesh.dist_checkpointing.stored_values import read_box
from remesh.layout import Box
from remesh.layout.from_torch import torch_dtype

INDEX_FNAME = "model.safetensors.index.json"
SINGLE_FNAME = "model.safetensors"
MAX_FILE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class ExportFile:
    """One file to be written."""

    name: str
    keys: tuple[str, ...]
    num_bytes: int


def plan_export(num_bytes_of: Mapping[str, int], max_file_bytes: int = MAX_FILE_BYTES) -> list[ExportFile]:
    """Which tensors go into which file: in order, a new file whenever the next tensor would make it too long.

    >>> [(one.name, one.keys) for one in plan_export({"a": 6, "b": 5, "c": 3}, 8)]
    [('model-00001-of-00002.safetensors', ('a',)), ('model-00002-of-00002.safetensors', ('b', 'c'))]
    """
    groups: list[list[str]] = []
    filled = 0
    for key, num_bytes in num_bytes_of.items():
        if not groups or filled + num_bytes > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(key)
        filled += num_bytes
    total = len(groups)
    names = (
        [SINGLE_FNAME] if total == 1 else [f"model-{at:05d}-of-{total:05d}.safetensors" for at in range(1, total + 1)]
    )
    return [
        ExportFile(name, tuple(keys), sum(num_bytes_of[key] for key in keys))
        for name, keys in zip(names, groups, strict=True)
    ]


def export(
    checkpoint: OpenCheckpoint,
    target: Location,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    rename: Callable[[str], str | None] = str,
    on_file: Callable[[ExportFile], None] = lambda file: None,
) -> list[ExportFile]:
    """Write the tensors of a checkpoint into directory ``target``, which must hold no export yet; one process.

    ``rename`` gives the name of each tensor in the export, None for one to be left out. The index, or the only file,
    comes last. Objects and common data have no place in this format.
    """
    with told_as_checkpoint_errors(f"exporting checkpoint {checkpoint.directory} to {target}"):
        key_of: dict[str, str] = {}
        for key in checkpoint.manifest.tensors:
            name = rename(key)
            if name is not None and key_of.setdefault(name, key) != key:
                raise CheckpointMismatchError(
                    f"exporting checkpoint {checkpoint.directory}: tensors {key_of[name]!r} and {key!r} would both be "
                    f"called {name!r}, expected one tensor per name; rename them otherwise"
                )
        store = store_of(target)
        store.make_directory(target)
        names = [entry.name for entry in store.entries(target)] if store.is_directory(target) else []
        if taken := [name for name in names if ".safetensors" in name]:
            raise CheckpointPathError(
                f"exporting checkpoint {checkpoint.directory} to {target}: the directory holds {taken[0]}, expected no "
                "safetensors file; nothing was overwritten, choose another directory"
            )
        files = plan_export({name: _num_bytes(checkpoint, key) for name, key in key_of.items()}, max_file_bytes)
        for file in files:
            _write_file(checkpoint, target / file.name, {name: key_of[name] for name in file.keys})
            on_file(file)
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(file.num_bytes for file in files)},
                "weight_map": {key: file.name for file in files for key in file.keys},
            }
            store.put(target / INDEX_FNAME, json.dumps(index, indent=2).encode())
        return files


def load_safetensors(tensors: Sequence[ShardedTensor], source: Path) -> None:
    """Fill the data of every sharded tensor from a file, or a directory of files; values are cast to its dtype.

    Reads the boxes that are wanted, no more. Raises `CheckpointMismatchError` for what is not there or has another
    shape, before any tensor is changed.
    """
    with told_as_checkpoint_errors(f"loading safetensors from {source}"), ExitStack() as opened:
        files: dict[Path, Any] = {}
        slices = []
        path_of = _paths(source)
        for tensor in tensors:
            path = path_of.get(tensor.key)
            if path is None:
                raise CheckpointMismatchError(
                    f"loading safetensors from {source}: tensor {tensor.key!r} is not there, expected one of "
                    f"{len(path_of)}, as {sorted(path_of)[:5]}; is it another model?"
                )
            if path not in files:
                files[path] = opened.enter_context(_opened(path))
            if tensor.key not in files[path].keys():  # noqa: SIM118 - it is no dict
                raise CheckpointFormatError(
                    "missing-tensor", f"loading safetensors: {path} lacks tensor {tensor.key!r}, which the index names"
                )
            stored = files[path].get_slice(tensor.key)
            if tuple(stored.get_shape()) != tensor.global_shape:
                raise CheckpointMismatchError(
                    f"Global shape mismatch for loaded ({tuple(stored.get_shape())}) and expected "
                    f"({tensor.global_shape}) tensor for key {tensor.key}"
                )
            slices.append((tensor, files[path], stored))
        for tensor, file, stored in slices:
            box: Box = tensor.global_box()
            values = stored[box.slices()] if box.ndim else file.get_tensor(tensor.key)
            tensor.data_in_box().copy_(values)


def _paths(source: Path) -> dict[str, Path]:
    """The file of each tensor."""
    if source.is_file():
        return dict.fromkeys(_keys(source), source)
    index = source / INDEX_FNAME
    if not index.exists():
        return {key: path for path in sorted(source.glob("*.safetensors")) for key in _keys(path)}
    try:
        found = json.loads(index.read_bytes())["weight_map"]
        paths = {str(key): source / _plain_name(name) for key, name in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as raised:
        raise CheckpointFormatError(
            "bad-index", f"reading {index}: expected a weight_map from names to files beside it, found: {raised!r}"
        ) from raised
    return paths


def _plain_name(name: Any) -> str:
    if not isinstance(name, str) or not name or name in (".", "..") or any(mark in name for mark in "/\\\0"):
        raise ValueError(f"file name {name!r}")
    return name


def _keys(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        yield from file.keys()


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, FileNotFoundError) as raised:
        raise CheckpointFormatError(
            "bad-safetensors", f"opening {path}: expected a safetensors file, found: {raised}; use another source"
        ) from raised


def _write_file(checkpoint: OpenCheckpoint, path: Location, key_of: Mapping[str, str]) -> None:
    tensors = {name: read_box(checkpoint, key) for name, key in key_of.items()}
    store_of(path).put(path, save(tensors, metadata={"format": "pt"}))


def _num_bytes(checkpoint: OpenCheckpoint, key: str) -> int:
    stored = checkpoint.manifest.tensors[key]
    return Box.of_shape(stored.global_shape).size * torch_dtype(stored.dtype).itemsize
