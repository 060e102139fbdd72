"""Columnar index of a checkpoint: the chunks as arrays of numbers, beside the ``.metadata`` pickle.

So the index of a million chunks is read in a second.

``.metadata`` has an object for every chunk, and a reader that does not trust the file checks each. This file holds the
same in columns, so that NumPy looks at all of them at once, and a tensor's description is made when it is asked for.

    | JSON, one line: files, kinds, keys, numbers of chunks | numbers, 8 bytes each | what .metadata is |

A *kind* is a dtype with a global shape. The numbers are the columns of `_IndexColumns`, one behind the other. At the
end stand length and checksum of the ``.metadata`` that was written with it: beside any other one the columns are
ignored. The file is used only where `integrity` has confirmed every byte of it; its numbers are validated nevertheless,
as untrusted input.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from remesh.checkpoint.plan.manifest import Extent, Manifest, Place, StoredChunk, StoredTensor
from remesh.checkpoint.storage import Location
from remesh.checkpoint.storage.integrity import parsing
from remesh.layout import Box
from remesh.layout.dtypes import ITEMSIZE_BYTES

VERSION = 1
_LARGEST = 1 << 62
END = struct.Struct("<8sQI")
MAGIC = b"remeshIX"
NUMBER = np.dtype("<i8")
_Numbers = npt.NDArray[np.int64]


def decode_columns(
    content: bytes, metadata: tuple[int, int], path: Location, check_name: Callable[[str], None]
) -> Manifest | None:
    """The manifest in a file; None when it belongs to another ``.metadata`` than that of this length and checksum.

    ``check_name`` is to raise for a data file whose name leads out of the checkpoint. Raises `CheckpointFormatError`
    for content that contradicts itself.
    """
    expected = f"the columns of an index of version {VERSION}"
    hint = "the checkpoint is damaged or foreign, use another one"
    with parsing("bad-metadata", f"reading {path}", expected, hint):
        magic, *fields = END.unpack_from(content, len(content) - END.size)
        if magic != MAGIC or tuple(fields) != metadata:
            return None
        columns = _read(content)
    for name in columns.files:
        check_name(name)
    extents = columns.extents(slice(columns.num_chunks, None))
    return Manifest(
        ColumnTensors(columns),
        dict(zip(columns.objects, extents, strict=True)),
        frozenset(columns.before_flattening),
        dict(columns.before_flattening),
    )


@dataclass(frozen=True, slots=True)
class _IndexColumns:
    """The content of the file, after its checks."""

    files: list[str]
    kinds: list[tuple[str, tuple[int, ...]]]
    """Dtype and global shape."""
    tensors: list[str]
    objects: list[str]
    before_flattening: dict[str, tuple[int, ...]]
    num_chunks: int
    """Of all tensors together."""
    kind_of: _Numbers
    """``[num_tensors]``"""
    first_chunk: _Numbers
    """``[num_tensors + 1]``: the chunks of a tensor are those from its first to that of the next."""
    places: _Numbers
    """``[num_chunks + num_objects, 3]``: file, start, length."""
    first_size: _Numbers
    """``[num_chunks + 1]``: where the sizes of a chunk begin in the next two."""
    starts: _Numbers
    shapes: _Numbers
    is_whole: npt.NDArray[np.bool_]
    """``[num_tensors]``: whether its one chunk is the tensor."""

    def extents(self, rows: slice) -> list[Extent]:
        files, starts, lengths = self.places[rows].T.tolist()
        return [Extent(self.files[file], start, length) for file, start, length in zip(files, starts, lengths)]  # noqa: B905


def _read(content: bytes) -> _IndexColumns:
    stop = content.index(b"\n")
    head = json.loads(content[:stop])
    if head["version"] != VERSION:
        raise ValueError(f"version {head['version']!r}")
    kinds = [(str(dtype), _shape(shape)) for dtype, shape in head["kinds"]]
    tensors, objects, files = (_texts(head[name]) for name in ("tensors", "objects", "files"))
    numbers = np.frombuffer(memoryview(content)[stop + 1 : -END.size], NUMBER)
    if len(numbers) and not (int(numbers.min()) >= 0 and int(numbers.max()) <= _LARGEST):
        raise ValueError("a number below 0 or above 2**62")
    num_tensors, num_chunks = len(tensors), int(head["num_chunks"])
    kind_of, chunks_of, places, sizes = _cut(numbers, (num_tensors, num_tensors, 3 * (num_chunks + len(objects))))
    places = places.reshape(-1, 3)
    if len(set(tensors) | set(objects)) != num_tensors + len(objects):
        raise ValueError("keys that repeat")
    if (chunks_of > num_chunks).any() or int(chunks_of.sum()) != num_chunks:
        raise ValueError(f"other chunks than {num_chunks}")
    if (kind_of >= len(kinds)).any() or (places[:, 0] >= len(files)).any():
        raise ValueError("a number of a kind or file that is not there")
    ndims = np.array([len(shape) for _, shape in kinds], np.int64)
    kind_of_chunk = np.repeat(kind_of, chunks_of)
    first_size = _running_sum(ndims[kind_of_chunk])
    starts, shapes = _cut(sizes, (int(first_size[-1]),))
    if len(starts) != len(shapes):
        raise ValueError(f"{len(starts)} starts and {len(shapes)} sizes of chunks")
    is_all = _check_boxes(kinds, kind_of_chunk, first_size, (starts, shapes), places[:num_chunks, 2])
    first_chunk = _running_sum(chunks_of)
    is_whole = (chunks_of == 1) & np.append(is_all, False)[first_chunk[:-1]]
    before = {str(key): _shape(shape) for key, shape in dict(head["before_flattening"]).items()}
    return _IndexColumns(
        files, kinds, tensors, objects, before, num_chunks, kind_of, first_chunk, places, first_size, starts, shapes,
        is_whole,
    )  # fmt: skip


def _check_boxes(
    kinds: Sequence[tuple[str, tuple[int, ...]]],
    kind_of_chunk: _Numbers,
    first_size: _Numbers,
    boxes: tuple[_Numbers, _Numbers],
    lengths: _Numbers,
) -> npt.NDArray[np.bool_]:
    """Whether each chunk is all of its tensor; ValueError unless all lie inside theirs, in bytes enough for them."""
    starts, shapes = boxes
    ndims = np.diff(first_size)
    chunk_of_size = np.repeat(np.arange(len(ndims)), ndims)
    first_of_kind = _running_sum(np.array([len(shape) for _, shape in kinds], np.int64))[:-1]
    dim = np.arange(len(chunk_of_size)) - first_size[:-1][chunk_of_size]
    global_sizes = np.array([n for _, shape in kinds for n in shape], np.int64)
    whole = global_sizes[first_of_kind[kind_of_chunk][chunk_of_size] + dim]
    if (shapes > whole - starts).any():
        raise ValueError("a chunk outside its tensor")
    num_elements = np.ones(len(ndims))  # of floats, which do not overflow; a blob is longer than its elements
    np.multiply.at(num_elements, chunk_of_size, shapes)
    itemsizes = np.array([ITEMSIZE_BYTES[dtype] for dtype, _ in kinds], np.float64)
    if (num_elements * itemsizes[kind_of_chunk] > lengths).any():
        raise ValueError("a chunk in too few bytes")
    num_cut = np.bincount(chunk_of_size, (starts != 0) | (shapes != whole), len(ndims))
    is_all: npt.NDArray[np.bool_] = num_cut == 0
    return is_all


class ColumnTensors(Mapping[str, StoredTensor]):
    """The tensors of an index by key; each is described when it is asked for."""

    def __init__(self, columns: _IndexColumns) -> None:
        self._columns = columns
        self._row_of = dict(zip(columns.tensors, range(len(columns.tensors)), strict=True))
        self._made: dict[str, StoredTensor] = {}

    def __getitem__(self, key: str) -> StoredTensor:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._describe(self._row_of[key])
        return found

    def __contains__(self, key: object) -> bool:
        return key in self._row_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._row_of)

    def __len__(self) -> int:
        return len(self._row_of)

    @cached_property
    def whole(self) -> dict[str, tuple[str, tuple[int, ...], Place]]:
        """Dtype, shape and place of every tensor that lies in one piece, by key."""
        columns = self._columns
        rows = np.flatnonzero(columns.is_whole)
        keys = [columns.tensors[row] for row in rows.tolist()]
        kinds = [columns.kinds[kind] for kind in columns.kind_of[rows].tolist()]
        numbers = columns.places[columns.first_chunk[rows]]
        files = [columns.files[file] for file in numbers[:, 0].tolist()]
        places = zip(files, numbers[:, 1].tolist(), numbers[:, 2].tolist(), strict=True)
        return {key: (*kind, place) for key, kind, place in zip(keys, kinds, places, strict=True)}

    def _describe(self, row: int) -> StoredTensor:
        columns = self._columns
        dtype, shape = columns.kinds[columns.kind_of[row]]
        first, stop = columns.first_chunk[row : row + 2].tolist()
        sizes = slice(columns.first_size[first], columns.first_size[stop])
        starts, shapes = (_rows(one[sizes], stop - first, len(shape)) for one in (columns.starts, columns.shapes))
        boxes = map(Box.at, starts, shapes)
        return StoredTensor(dtype, shape, tuple(map(StoredChunk, boxes, columns.extents(slice(first, stop)))))


def _rows(numbers: _Numbers, num_rows: int, length: int) -> list[tuple[int, ...]]:
    return [tuple(row) for row in numbers.reshape(num_rows, length).tolist()]


def _running_sum(counts: _Numbers) -> _Numbers:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _cut(numbers: _Numbers, lengths: Sequence[int]) -> list[_Numbers]:
    """The first parts of these lengths, and the rest."""
    stops = np.cumsum(lengths)
    if min(lengths) < 0 or stops[-1] > len(numbers):
        raise ValueError(f"{len(numbers)} numbers, expected at least {stops[-1]}")
    return np.split(numbers, stops)


def _shape(found: Any) -> tuple[int, ...]:
    shape = tuple(found)
    if not all(type(size) is int and 0 <= size <= _LARGEST for size in shape):
        raise ValueError(f"shape {shape!r:.80}")
    return shape


def _texts(found: Any) -> list[str]:
    if not isinstance(found, list) or not all(type(one) is str for one in found):
        raise ValueError(f"{found!r:.80} where texts belong")
    return found
