"""Format ``torch_dist``: the files of ``torch.distributed.checkpoint``, which native torch reads too.

A directory holds ``__{rank}_0.distcp`` files of blobs one after another, and ``.metadata``, a pickle of torch's own
plain ``Metadata`` that has which box of which tensor lies in which bytes of which file. Objects stand under their
unique key. State-dict keys are not stored, entity keys are.

Writing goes through torch's classes; reading never does (see `inert_pickle`): every value of a file is checked
before use, and no path in it may leave the directory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError
from remesh.checkpoint.formats.directory import COLUMNS_FNAME, METADATA_FNAME
from remesh.checkpoint.formats.index_columns import decode_columns
from remesh.checkpoint.formats.inert_pickle import Record, brief, load_inert
from remesh.checkpoint.plan.manifest import Extent, Manifest, StoredChunk, StoredTensor
from remesh.checkpoint.storage import Location, store_of
from remesh.checkpoint.storage.integrity import Checksums, check_length
from remesh.foundation.errors import LayoutError
from remesh.layout import Box
from remesh.layout.from_torch import torch_dtype

BACKEND = "torch_dist"
BACKEND_VERSION = 1
_LARGEST = 1 << 62
ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"
"""Name under which ``mcore_data`` has the global shape that a flattened tensor had."""


def read_manifest(directory: Location, checksums: Checksums | None = None) -> Manifest:
    """The manifest of a checkpoint; `CheckpointFormatError` for anything missing, damaged, foreign or hostile.

    With the checksums of a checkpoint the index is read from its columns, where they are among the files summed up.
    """
    path = directory / METADATA_FNAME
    if checksums is not None and COLUMNS_FNAME in checksums.entries and store_of(path).size_of(path) is not None:
        manifest = _manifest_in_columns(directory, checksums)
        if manifest is not None:
            return manifest
    try:
        content = store_of(path).read(path)
    except FileNotFoundError as raised:
        raise CheckpointFormatError(
            "missing-metadata",
            f"reading the index of checkpoint {directory}: {METADATA_FNAME} does not exist, expected it beside the "
            "data files; the checkpoint is incomplete, use another one",
        ) from raised
    return _manifest_from(load_inert(content, path), path)


def _manifest_in_columns(directory: Location, checksums: Checksums) -> Manifest | None:
    path, entry = directory / COLUMNS_FNAME, checksums.entries.get(METADATA_FNAME)
    content = checksums.read(COLUMNS_FNAME)
    if entry is None:
        return None
    manifest = decode_columns(
        content, (entry.num_bytes, entry.crc), path, lambda name: _check_name(name, "a tensor", path)
    )
    if manifest is not None:
        for key, shape in manifest.unflattened_shapes.items():
            _check_before_flattening(key, shape, manifest.tensors[key].global_shape, path)
    return manifest


def check_files(directory: Location, extents: Sequence[Extent]) -> None:
    """Raise `CheckpointFormatError` unless every extent lies inside its file."""
    needed: dict[str, int] = {}
    for extent in extents:
        needed[extent.file] = max(needed.get(extent.file, 0), extent.file_stop)
    for name, num_bytes in needed.items():
        path = path_inside(directory, name)
        check_length(path, num_bytes, store_of(path).size_of(path), may_be_longer=True)


def path_inside(directory: Location, name: str) -> Location:
    """The file of that name; following links, it must not lead out of the directory."""
    path = directory / name
    if not store_of(directory).is_inside(directory, path):
        raise CheckpointFormatError(
            "escaping-path",
            f"opening data file {name!r} of checkpoint {directory}: it lies outside the directory, at {path}; put a "
            "copy in its place if the link is yours, and else do not trust this checkpoint",
        )
    return path


def _manifest_from(metadata: Any, path: Location) -> Manifest:
    entries = _dict(_field(metadata, "Metadata", "state_dict_metadata", path), "state_dict_metadata", path)
    storage = _dict(_field(metadata, "Metadata", "storage_data", path), "storage_data", path)
    extents: dict[tuple[str, tuple[int, ...] | None], Extent] = {}
    for index, info in storage.items():
        key = _field(index, "MetadataIndex", "fqn", path)
        if not isinstance(key, str):
            raise _bad(path, f"a key of storage_data is {brief(key)}, expected text")
        offset = getattr(index, "offset", None)
        place = (key, None if offset is None else _numbers(offset, f"offset of {key!r}", path))
        extents[place] = _extent_from(info, f"{key!r}", path)
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Extent] = {}
    for key, entry in entries.items():
        if not isinstance(key, str):
            raise _bad(path, f"a key of state_dict_metadata is {brief(key)}, expected text")
        if getattr(entry, "kind", None) == "BytesStorageMetadata":
            objects[key] = _lookup(extents, (key, None), path)
        else:
            tensors[key] = _tensor_from(entry, key, extents, path)
    mcore_data = _dict(getattr(metadata, "mcore_data", None) or {}, "mcore_data", path)
    flattened = frozenset(str(key) for key, value in mcore_data.items() if value)
    return Manifest(tensors, objects, flattened, _original_shapes(mcore_data, tensors, path))


def _original_shapes(
    mcore_data: Mapping[Any, Any], tensors: Mapping[str, StoredTensor], path: Location
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for key, value in mcore_data.items():
        if isinstance(value, dict) and ORIGINAL_SHAPE in value and key in tensors:
            shapes[key] = _numbers(value[ORIGINAL_SHAPE], f"shape of {key!r} before flattening", path)
            _check_before_flattening(key, shapes[key], tensors[key].global_shape, path)
    return shapes


def _check_before_flattening(key: str, shape: tuple[int, ...], stored: tuple[int, ...], path: Location) -> None:
    cells = stored[:-1]
    whole = len(shape) == len(cells) and all(part and n % part == 0 for n, part in zip(shape, cells, strict=True))
    if not whole or math.prod(shape) != math.prod(stored):
        raise _bad(path, f"tensor {key!r} of shape {shape} is stored flattened as {stored}, which differs")


def _tensor_from(
    entry: Any, key: str, extents: Mapping[tuple[str, tuple[int, ...] | None], Extent], path: Location
) -> StoredTensor:
    global_shape = _numbers(_field(entry, "TensorStorageMetadata", "size", path), f"size of {key!r}", path)
    properties = _field(entry, "TensorStorageMetadata", "properties", path)
    dtype = properties.packed[0] if isinstance(getattr(properties, "packed", None), tuple) else None
    chunks = _field(entry, "TensorStorageMetadata", "chunks", path)
    if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise _bad(path, f"tensor {key!r} has dtype {brief(dtype)}")
    if not isinstance(chunks, list):
        raise _bad(path, f"tensor {key!r} has chunks of type {type(chunks).__name__}")
    stored = []
    for chunk in chunks:
        start = _numbers(_field(chunk, "ChunkStorageMetadata", "offsets", path), f"chunk offset of {key!r}", path)
        shape = _numbers(_field(chunk, "ChunkStorageMetadata", "sizes", path), f"chunk size of {key!r}", path)
        try:
            box = Box.at(start, shape)
        except LayoutError as raised:
            raise _bad(path, f"tensor {key!r} has a chunk that is no box: {raised}") from raised
        if shape != global_shape or any(start):  # a chunk that is the whole tensor needs no algebra
            if len(shape) != len(global_shape):
                raise _bad(path, f"tensor {key!r} has a chunk of {len(shape)} dims, expected {len(global_shape)}")
            if not Box.of_shape(global_shape).contains(box):
                raise _bad(path, f"tensor {key!r} of shape {global_shape} has a chunk {box} that lies outside")
        extent = _lookup(extents, (key, start), path)
        if extent.length_bytes < box.size * torch_dtype(dtype).itemsize:
            raise _bad(path, f"tensor {key!r} has a chunk {box} of {dtype} in {extent.length_bytes} bytes")
        stored.append(StoredChunk(box, extent))
    return StoredTensor(dtype, global_shape, tuple(stored))


def _extent_from(info: Any, what: str, path: Location) -> Extent:
    name = _field(info, "_StorageInfo", "relative_path", path)
    if not isinstance(name, str):
        raise _bad(path, f"the file of {what} is {brief(name)}, expected a name")
    _check_name(name, what, path)
    if getattr(info, "transform_descriptors", None):
        raise CheckpointFormatError(
            "unknown-transform",
            f"reading {path}: {what} is stored through {brief(info.transform_descriptors)}, expected plain bytes; load "
            "it with torch.distributed.checkpoint and save it anew",
        )
    numbers = (_field(info, "_StorageInfo", "offset", path), _field(info, "_StorageInfo", "length", path))
    return Extent(name, *_numbers(numbers, f"extent of {what}", path))


def _check_name(name: str, what: str, path: Location) -> None:
    pure = PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts:
        raise CheckpointFormatError(
            "escaping-path",
            f"reading {path}: {what} lies in file {name!r}, expected a path inside the checkpoint directory; the "
            "checkpoint is hostile, do not trust it",
        )


def _lookup(
    extents: Mapping[tuple[str, tuple[int, ...] | None], Extent],
    place: tuple[str, tuple[int, ...] | None],
    path: Location,
) -> Extent:
    if place not in extents:
        raise _bad(path, f"{place[0]!r} at offset {place[1]} has no storage entry")
    return extents[place]


def _field(record: Any, kind: str, name: str, path: Location) -> Any:
    if not isinstance(record, Record) or record.kind != kind or name not in vars(record):
        raise _bad(path, f"there is {brief(record)} where a {kind} with {name} was expected")
    return vars(record)[name]


def _dict(value: Any, what: str, path: Location) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _bad(path, f"{what} is a {type(value).__name__}, expected a dict")
    return value


def _numbers(values: Any, what: str, path: Location) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(value) is int and 0 <= value <= _LARGEST for value in values):
        raise _bad(path, f"{what} is {brief(values)}, expected numbers from 0 to 2**62")
    return tuple(values)


def _bad(path: Location, found: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        "bad-metadata", f"reading {path}: {found}; the checkpoint is damaged or foreign, use another one"
    )
