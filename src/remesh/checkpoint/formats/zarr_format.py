"""Format ``zarr``: a directory for each tensor, with a file for each cell of a regular grid (zarr version 2).

    KEY/.zarray            JSON: shape, shape of a cell, dtype
    KEY/0.1                the elements of cell (0, 1), row-major, bare; cells at the end of the grid are padded
    KEY/shard_0_2.pt       element 0 of 2 of the object KEY, as torch.save writes it

Nothing is compressed or filtered, so a cell is a chunk of bare elements and is read in ranges like any other. That is
how Megatron Core writes; other zarr arrays are refused by what they need. The reader believes a ``.zarray`` only as far
as there are files of the right length. Checksums of all files stand in one, beside the marker. Until the save is
committed every file is staged (see `storage.save_lock`): its name is fixed, and another save may have taken over.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointMismatchError
from remesh.checkpoint.formats.data_file import elements_of
from remesh.checkpoint.plan.manifest import Extent, Manifest, StoredChunk, StoredTensor
from remesh.checkpoint.storage import Entry, Location, store_of
from remesh.checkpoint.storage.integrity import Checksums, Trailer, check_length, parsing, table_of
from remesh.checkpoint.storage.save_lock import SaveLock, lock_staged_in_folder
from remesh.checkpoint.values.entities import ShardedObject
from remesh.layout import Box
from remesh.layout.from_torch import torch_dtype

BACKEND = "zarr"
BACKEND_VERSION = 1
ARRAY_FNAME = ".zarray"
_SYNC_SUFFIX = ".sync"
_OBJECT = re.compile(r"shard_(?P<offset>\d+(?:\.\d+)*)_(?P<shape>\d*(?:\.\d+)*)\.pt")
_CELL = re.compile(r"\d+(?:\.\d+)*")
_MAX_DEPTH = 16
_DTYPES = {
    "bool": "|b1",
    "uint8": "|u1",
    "int8": "|i1",
    "bfloat16": "bfloat16",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "complex64": "<c8",
    "complex128": "<c16",
}
"""Names of dtypes here and in the file; bfloat16 has none in NumPy and stands under its own."""
_NAMES = {code: name for name, code in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Array:
    """The content of a ``.zarray`` file."""

    dtype: str
    shape: tuple[int, ...]
    cell_shape: tuple[int, ...]
    """Invariant: as many dims as ``shape``, each size at least 1."""
    separator: str = "."
    """Between the numbers in the name of a cell."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of cells in each dim."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.cell_shape, strict=True))

    @property
    def cell_bytes(self) -> int:
        """Length of the file of a cell."""
        return math.prod(self.cell_shape) * torch_dtype(self.dtype).itemsize

    def cells(self) -> Iterator[tuple[str, Box]]:
        """Name and box of each cell, the box cut at the end of the array."""
        for index in product(*map(range, self.grid)):
            start = tuple(at * step for at, step in zip(index, self.cell_shape, strict=True))
            ends = zip(start, self.cell_shape, self.shape, strict=True)
            yield self.cell_name(index), Box(start, tuple(min(at + step, size) for at, step, size in ends))

    def has_file(self, name: str) -> bool:
        """Whether its directory has a file of that name."""
        if name == ARRAY_FNAME or not self.shape:
            return name in (ARRAY_FNAME, self.cell_name(()))
        index = tuple(map(int, name.split("."))) if _CELL.fullmatch(name) else ()
        is_inside = len(index) == len(self.shape) and all(map(operator.lt, index, self.grid))
        return is_inside and name == self.cell_name(index)

    def cell_name(self, index: Sequence[int]) -> str:
        """Name of the file of a cell, within the directory of the array.

        >>> Array("float32", (4, 4), (2, 2)).cell_name((1, 0))
        '1.0'
        """
        return self.separator.join(map(str, index)) or "0"

    def encode(self) -> bytes:
        """The content of the ``.zarray``."""
        found = {
            "chunks": list(self.cell_shape),
            "compressor": None,
            "dtype": _DTYPES[self.dtype],
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(self.shape),
            "zarr_format": 2,
        }
        return json.dumps(found, indent=4, sort_keys=True).encode()


def array_of(key: str, dtype: str, shape: tuple[int, ...], cell_shape: tuple[int, ...]) -> Array:
    """The array of a tensor; `CheckpointMismatchError` for a dtype or a key that the format has no place for."""
    if dtype not in _DTYPES:
        raise CheckpointMismatchError(
            f"storing tensor {key!r} as zarr: its dtype is {dtype}, expected one of {', '.join(_DTYPES)}; save it as "
            "torch_dist"
        )
    if any(not part or part in (".", "..") or part.endswith(_SYNC_SUFFIX) for part in key.split("/")):
        raise CheckpointMismatchError(
            f"storing tensor {key!r} as zarr: the key would be the name of a directory, expected one without empty "
            f"parts, '..' and the ending {_SYNC_SUFFIX}; rename it, or save it as torch_dist"
        )
    return Array(dtype, shape, tuple(max(1, size) for size in cell_shape))


def check_places(arrays: Mapping[str, Array], objects: Collection[str], others: Collection[str]) -> None:
    """Raise `CheckpointMismatchError` for a key whose directory would lie where a file does.

    ``objects`` are unique keys; ``others`` the names of what lies beside the directories of tensors.
    """
    files = {*others, *(f"{one}.pt" for one in objects)}
    for key in (*arrays, *(one.rpartition("/")[0] for one in objects)):
        for end in range(1, key.count("/") + 2):
            place = "/".join(key.split("/")[:end])
            owner, _, name = place.rpartition("/")
            if place in files or (owner in arrays and arrays[owner].has_file(name)):
                whose = "a file of the checkpoint" if place in others else f"a file of {owner!r}"
                raise CheckpointMismatchError(
                    f"storing {key!r} as zarr: its directory {place!r} is the name of {whose} as well, expected one "
                    "place for each; rename the key, or save it as torch_dist"
                )


def write_array(lock: SaveLock, key: str, array: Array) -> dict[str, Trailer]:
    """Make the directory of a tensor with its description; returns the checksums. Called by one rank for each key."""
    store, content = store_of(lock.directory), array.encode()
    name = f"{key}/{ARRAY_FNAME}"
    store.make_directory(lock.directory / key)
    store.write(lock.staged(name), content)
    return {name: table_of(content)}


def write_cell(lock: SaveLock, key: str, array: Array, box: Box, values: torch.Tensor) -> dict[str, Trailer]:
    """Write the file of one cell durably; returns its checksums."""
    index = tuple(at // step for at, step in zip(box.start, array.cell_shape, strict=True))
    name = f"{key}/{array.cell_name(index)}"
    plain = values
    if tuple(plain.shape) != array.cell_shape:
        padded = plain.new_zeros(array.cell_shape)
        padded[tuple(slice(0, size) for size in plain.shape)] = plain
        plain = padded
    content = elements_of(plain)
    store_of(lock.directory).write(lock.staged(name), content)
    return {name: table_of(content)}


def write_object(lock: SaveLock, unique_key: str, blob: bytes) -> dict[str, Trailer]:
    """Write the file of one element of an object durably; returns its checksums."""
    name = f"{unique_key}.pt"
    path, store = lock.directory / name, store_of(lock.directory)
    if not store.is_inside(lock.directory, path):
        raise CheckpointMismatchError(
            f"storing object {unique_key!r} as zarr: its file would lie outside {lock.directory}; rename its key"
        )
    store.make_directory(path.parent)
    store.write(lock.staged(name), blob)
    return {name: table_of(blob)}


def read_zarr_manifest(directory: Location, checksums: Checksums) -> Manifest:
    """All arrays and objects below a directory; `CheckpointFormatError` for what is missing, damaged or foreign."""
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Extent] = {}
    for key, sizes in folders_below(directory):
        if store_of(directory).is_link(directory / key):
            raise CheckpointFormatError(
                "escaping-path",
                f"reading checkpoint {directory}: {key!r} is a link, expected a directory; put a copy in its place, if "
                "you trust what it leads to",
            )
        if ARRAY_FNAME in sizes:
            array = _decode(checksums.read(f"{key}/{ARRAY_FNAME}"), directory / key / ARRAY_FNAME)
            tensors[key] = _stored(directory, key, array, sizes)
        objects.update(_objects(key, sizes))
    missing = [name for name in checksums.entries if name.endswith(f"/{ARRAY_FNAME}") and name[:-8] not in tensors]
    if missing:
        raise CheckpointFormatError(
            "missing-file", f"reading checkpoint {directory}: {missing[0]} was written and is not there any more"
        )
    return Manifest(tensors, objects, has_bare_objects=True)


def remove_staged(directory: Location, before: int) -> None:
    """Remove what earlier saves of this format have staged."""
    for key, sizes in folders_below(directory):
        for name in sizes:
            number = lock_staged_in_folder(name)
            if number is not None and number < before:
                store_of(directory).remove(directory / key / name)


def remove_arrays(directory: Location, kept: Collection[str] = ()) -> None:
    """Remove what saves of this format have left below a directory without a save in it; but not the files ``kept``."""
    store = store_of(directory)
    for key, sizes in list(folders_below(directory))[::-1]:
        for name in sizes:
            if _is_ours(name.removesuffix(".tmp")) and f"{key}/{name}" not in kept:
                store.remove(directory / key / name)
        is_ours = store.has_directories and not store.is_link(directory / key)
        if is_ours and not store.entries(directory / key):
            store.remove_directory(directory / key)


def _is_ours(name: str) -> bool:
    is_named = name == ARRAY_FNAME or _CELL.fullmatch(name) or _OBJECT.fullmatch(name)
    return bool(is_named) or lock_staged_in_folder(name) is not None


def folders_below(
    directory: Location, entries: Sequence[Entry] | None = None
) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Every directory below, by its name from there, with the lengths of the files in it; ``entries`` if known.

    Of a symbolic link the name alone, without files: what it leads to is no part of the checkpoint.
    """
    for one in store_of(directory).entries(directory) if entries is None else entries:
        if not one.is_file and not one.name.endswith(_SYNC_SUFFIX):
            yield from _folders(directory, one.name, 1)


def _folders(directory: Location, name: str, depth: int) -> Iterator[tuple[str, Mapping[str, int]]]:
    if depth > _MAX_DEPTH:
        raise CheckpointFormatError(
            "bad-zarr", f"reading checkpoint {directory}: directories lie deeper than {_MAX_DEPTH}, at {name!r}"
        )
    place = directory / name
    if store_of(directory).is_link(place):
        yield name, {}
        return
    entries = store_of(directory).entries(place)
    yield name, {one.name: one.num_bytes for one in entries if one.num_bytes is not None}
    for one in entries:
        if not one.is_file and not one.name.endswith(_SYNC_SUFFIX):
            yield from _folders(directory, f"{name}/{one.name}", depth + 1)


def _decode(content: bytes, path: Location) -> Array:
    expected = (
        f"an array of zarr version 2, row-major, without compressor and filters, of a dtype among {', '.join(_NAMES)}"
    )
    with parsing("bad-zarr", f"reading {path}", expected, "it is damaged or of another writer"):
        found = json.loads(content)
        shape, cell_shape = (_sizes(found[name]) for name in ("shape", "chunks"))
        foreign = {
            name: found.get(name)
            for name, expected in (("zarr_format", 2), ("compressor", None), ("filters", None), ("order", "C"))
            if found.get(name) != expected
        }
        code = found["dtype"]
        if foreign or not isinstance(code, str) or code not in _NAMES:
            raise ValueError(f"dtype {code!r} and {foreign}")
        if len(shape) != len(cell_shape) or 0 in cell_shape:
            raise ValueError(f"shape {shape} in cells of {cell_shape}")
        separator = found.get("dimension_separator", ".")
        if separator not in (".", "/"):
            raise ValueError(f"dimension_separator {separator!r}")
    return Array(_NAMES[code], shape, cell_shape, separator)


def _sizes(found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(size) is int and 0 <= size < 1 << 62 for size in found):
        raise ValueError(f"sizes {found!r}")
    return tuple(found)


def _stored(directory: Location, key: str, array: Array, sizes: Mapping[str, int]) -> StoredTensor:
    """The array as chunks, after seeing that there is a file of the right length for each."""
    num_cells, num_files = math.prod(array.grid), len(sizes) - 1
    if array.separator == "." and num_cells > num_files:
        raise CheckpointFormatError(
            "missing-file",
            f"reading tensor {key!r} of {directory}: expected the files of {num_cells} cells, found {num_files} files; "
            "the checkpoint is damaged, use another one",
        )
    chunks = []
    for name, box in array.cells():
        file = f"{key}/{name}"
        path = directory / file
        found = sizes.get(name) if array.separator == "." else store_of(path).size_of(path)
        check_length(path, array.cell_bytes, found)
        chunks.append(StoredChunk(box, Extent(file, 0, array.cell_bytes), array.cell_shape))
    return StoredTensor(array.dtype, array.shape, tuple(chunks))


def _objects(key: str, sizes: Mapping[str, int]) -> dict[str, Extent]:
    """Objects of a directory by unique key. In old names the last size is missing: it is the highest offset + 1."""
    found = {name: match for name in sizes if (match := _OBJECT.fullmatch(name))}
    offsets = {name: tuple(map(int, match["offset"].split("."))) for name, match in found.items()}
    objects = {}
    for name, match in found.items():
        offset = offsets[name]
        shape = tuple(map(int, filter(None, match["shape"].split("."))))
        if len(shape) + 1 == len(offset):
            shape += (max(other[-1] for other in offsets.values() if len(other) == len(offset)) + 1,)
        if len(shape) == len(offset):
            unique_key = ShardedObject(key, None, shape, offset).unique_key
            objects[unique_key] = Extent(f"{key}/{name}", 0, sizes[name])
    return objects
