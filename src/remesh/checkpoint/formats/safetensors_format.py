"""Hugging Face's format: ``*.safetensors`` files and an index that lists which tensor is in which file.

    8 bytes: length of the header | header: JSON, name -> dtype, shape, where in the data | data: bare elements

Elements lie bare and row-major, so the tensors of a file are chunks that are planned and read in ranges like any
others. Writing streams: it needs memory for one band of one tensor. A header is believed after it has been compared
with the length of the file. That others read what is written here, and the reverse, is held by tests against the
library.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointPathError,
)
from remesh.checkpoint.formats.data_file import elements_of
from remesh.checkpoint.plan.manifest import Extent, Manifest, StoredChunk, StoredTensor
from remesh.checkpoint.storage import Location, store_of
from remesh.checkpoint.storage.integrity import parsing, plain_name
from remesh.layout import Box, itemsize_bytes

FORMAT = "safetensors"
INDEX_FNAME = "model.safetensors.index.json"
SINGLE_FNAME = "model.safetensors"
MAX_FILE_BYTES = 4 << 30
_SUFFIX = ".safetensors"
_NUMBERED = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
_OF_A_RANK = re.compile(r"shard-\d{5}-")
_PARTS = "DCP_SHARDING_INFO"
"""Key of native torch in a file: where the parts of tensors begin; also in files that have whole ones."""
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "bool": "BOOL",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
_NAMES = {code: name for name, code in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class BandedTensor:
    """A tensor to be written, of which no more than a band need be in memory."""

    dtype: str
    shape: tuple[int, ...]
    bands: Callable[[], Iterable[torch.Tensor]]
    """Gives its values, part by part."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(self.shape) * itemsize_bytes(self.dtype)


def plan_export(num_bytes_of: Mapping[str, int], max_file_bytes: int = MAX_FILE_BYTES) -> dict[str, list[str]]:
    """Assign tensors to files, in order; a new file begins when the next tensor would make the current one too long.

    >>> plan_export({"a": 6, "b": 5, "c": 3}, 8)
    {'model-00001-of-00002.safetensors': ['a'], 'model-00002-of-00002.safetensors': ['b', 'c']}
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
    return dict(zip(names, groups, strict=True))


def write_tensors(
    sources: Mapping[str, BandedTensor],
    target: Location,
    max_file_bytes: int = MAX_FILE_BYTES,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, list[str]]:
    """Write tensors, by name, into a directory that holds none of this format yet; returns those in each file."""
    for name, source in sources.items():
        if source.dtype not in _DTYPES:
            raise CheckpointMismatchError(
                f"writing tensor {name!r} as safetensors: its dtype is {source.dtype}, expected one of "
                f"{', '.join(_DTYPES)}; leave it out"
            )
    store = store_of(target)
    store.make_directory(target)
    names = [entry.name for entry in store.entries(target)] if store.is_directory(target) else []
    if taken := [name for name in names if _SUFFIX in name]:
        raise CheckpointPathError(
            f"writing safetensors to {target}: the directory holds {taken[0]}, expected no safetensors file; nothing "
            "was overwritten, choose another directory"
        )
    files = plan_export({name: source.num_bytes for name, source in sources.items()}, max_file_bytes)
    for file, keys in files.items():
        _write_file({key: sources[key] for key in keys}, target / file, on_bytes)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(source.num_bytes for source in sources.values())},
            "weight_map": {key: file for file, keys in files.items() for key in keys},
        }
        store.put(target / INDEX_FNAME, json.dumps(index, indent=2).encode())
    store.sync_names(target)
    return files


def read_safetensors_manifest(place: Location) -> tuple[Location, Manifest]:
    """The tensors of a file, or of a directory of files with or without an index; and the directory they lie in."""
    if store_of(place).size_of(place) is not None:
        return place.parent, Manifest(_tensors_in(place.parent, place.name), {})
    tensors: dict[str, StoredTensor] = {}
    for name, wanted in _files_in(place).items():
        found = _tensors_in(place, name)
        for key in found if wanted is None else wanted:
            if key not in found:
                raise CheckpointFormatError(
                    "missing-tensor",
                    f"loading safetensors: {place / name} lacks tensor {key!r}, which the index names",
                )
            if key in tensors:
                raise CheckpointFormatError(
                    "tensor-twice",
                    f"loading safetensors: tensor {key!r} is in {place / name} and in another file there, expected it "
                    "in one, or an index; name the file that is meant",
                )
            tensors[key] = found[key]
    return place, Manifest(tensors, {})


def is_safetensors(place: Location) -> bool:
    """Whether a place is a file of this format by its name, or a directory with such files."""
    store = store_of(place)
    if not store.is_directory(place):
        return place.name.endswith(_SUFFIX)
    return any(entry.name.endswith(_SUFFIX) for entry in store.entries(place))


def _files_in(place: Location) -> dict[str, list[str] | None]:
    """The files of a directory, each with the tensors that it has by the index; None where there is no index."""
    store, index = store_of(place), place / INDEX_FNAME
    if store.size_of(index) is None:
        names = [entry.name for entry in store.entries(place) if entry.name.endswith(_SUFFIX)]
        _check_complete(place, names)
        return dict.fromkeys(names)
    with parsing("bad-index", f"reading {index}", "a weight_map from names to files beside it"):
        keys_of: dict[str, list[str] | None] = {}
        for key, name in json.loads(store.read(index))["weight_map"].items():
            keys = keys_of.setdefault(plain_name(name), [])
            assert keys is not None
            keys.append(str(key))
    if SINGLE_FNAME not in keys_of and store.size_of(place / SINGLE_FNAME) is not None:
        raise CheckpointFormatError(
            "bad-index",
            f"loading safetensors: {place} has {SINGLE_FNAME}, and an index that does not name it, expected one of "
            "them; remove the one that is left of an older save, or name the file that is meant",
        )
    return keys_of


def _check_complete(place: Location, names: Sequence[str]) -> None:
    """Files that count themselves, ``model-00001-of-00003``, have to be all there where no index lists them."""
    for match in filter(None, map(_NUMBERED.fullmatch, names)):
        wanted = [f"{match[1]}-{at:0{len(match[2])}d}-of-{match[2]}{_SUFFIX}" for at in range(1, int(match[2]) + 1)]
        if missing := [name for name in wanted if name not in names]:
            raise CheckpointFormatError(
                "missing-file",
                f"loading safetensors: {place} has {match[0]}, and lacks {missing[0]}, expected all {match[2]}; copy "
                "all of them, and the index",
            )


def _tensors_in(directory: Location, name: str) -> dict[str, StoredTensor]:
    path = directory / name
    if not store_of(path).is_inside(directory, path):
        raise CheckpointFormatError("escaping-path", f"opening {path}: it lies outside {directory}; do not load it")
    doing = parsing("bad-safetensors", f"opening {path}", "a safetensors file", "use another source")
    with doing, store_of(path).open_ranged(path) as file:
        start = bytearray(_LENGTH_BYTES)
        file.read_into(0, memoryview(start))
        length = int.from_bytes(start, "little")
        if file.num_bytes < _LENGTH_BYTES + length or not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{file.num_bytes} bytes with a header of {length}")
        header = bytearray(length)
        file.read_into(_LENGTH_BYTES, memoryview(header))
        found = json.loads(header)
        _check_is_whole(path, found.pop("__metadata__", None) or {})
        return _decode(found, name, _LENGTH_BYTES + length, file.num_bytes)


def _check_is_whole(path: Location, extra: Mapping[str, str]) -> None:
    """Refuse the file of one rank of a save by native torch, which has parts of tensors under their names.

    It has where a part begins, and not how large the tensor is; also a part that begins at 0 need not be the whole.
    """
    parts = json.loads(extra.get(_PARTS, "{}"))
    if parts and (_OF_A_RANK.match(path.name) or any(any(one["saved_offsets"]) for one in parts.values())):
        raise CheckpointFormatError(
            "parts-of-tensors",
            f"opening {path}: it has what one rank of a save by torch's HuggingFaceStorageWriter held of {len(parts)} "
            "tensors, expected whole ones; let that writer put them together (enable_consolidation=True), or read them "
            "with torch's HuggingFaceStorageReader",
        )


def _decode(header: Mapping[str, Any], name: str, data_start: int, file_stop: int) -> dict[str, StoredTensor]:
    """The tensors of a header, which have to fill the data without gaps, as the library demands."""
    tensors: dict[str, StoredTensor] = {}
    extents: list[tuple[int, int]] = []
    for key, entry in header.items():
        dtype, shape, (start, stop) = _NAMES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError(f"tensor {key!r} of shape {shape} at {start}:{stop}")
        if math.prod(shape) * itemsize_bytes(dtype) != stop - start:
            raise ValueError(f"tensor {key!r} of dtype {dtype} and shape {shape} in {stop - start} bytes")
        extents.append((start, stop))
        extent = Extent(name, data_start + start, stop - start)
        tensors[key] = StoredTensor(dtype, shape, (StoredChunk(Box.of_shape(shape), extent, shape),))
    at = 0
    for start, stop in sorted(extents):
        if start != at:
            raise ValueError(f"a tensor at {start}, expected it at {at}")
        at = stop
    if data_start + at != file_stop:
        raise ValueError(f"{file_stop} bytes, expected {data_start + at}")
    return tensors


def _write_file(sources: Mapping[str, BandedTensor], path: Location, on_bytes: Callable[[int], None]) -> None:
    # Wide elements first, so that each tensor lies where its dtype wants it; that is the library's order, too.
    names = sorted(sources, key=lambda name: (-itemsize_bytes(sources[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        source = sources[name]
        offsets = [at, at + source.num_bytes]
        header[name] = {"dtype": _DTYPES[source.dtype], "shape": list(source.shape), "data_offsets": offsets}
        at = offsets[1]
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    with store_of(path).create(path) as file:
        file.write(memoryview(len(content).to_bytes(_LENGTH_BYTES, "little") + content))
        for name in names:
            for band in sources[name].bands():
                elements = elements_of(band)
                file.write(elements)
                on_bytes(len(elements))
        file.finish()
