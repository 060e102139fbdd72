"""Encoder of a checkpoint's index into two files: columns, and a pickle made from templates.

So the index of a million chunks is written in seconds.

torch's own objects are pickled once each, with placeholders for their values; what stands between the placeholders is
the same for all chunks. Classes, file names and tensor properties are put into the pickle's memo first and referred to
by number. So the result is what `pickle.dumps` makes of ``Metadata``, but for the numbering of the memo; no object per
chunk is made.

The same index as columns of numbers, which this package reads, is described in `index_columns`.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from remesh.checkpoint.formats.directory import COLUMNS_FNAME, METADATA_FNAME
from remesh.checkpoint.formats.index_columns import END, MAGIC, NUMBER, VERSION
from remesh.checkpoint.formats.torch_format import ORIGINAL_SHAPE
from remesh.checkpoint.plan.manifest import Index, Manifest, Place
from remesh.checkpoint.storage import Location, store_of
from remesh.checkpoint.storage.save_lock import SaveLock
from remesh.foundation.checksums import crc32
from remesh.foundation.torch_private import StorageInfo
from remesh.layout.from_torch import torch_dtype

_VERSION = "1.0.0"
_GLOBAL = re.compile(rb"c[\w.]+\n[\w.]+\n")
_MARKS = [f"\0mark {number}\0" for number in range(4)]


@dataclass(frozen=True, slots=True)
class IndexFiles:
    """An index as the bytes of its two files, to be written into any number of checkpoints."""

    pickled: EncodedIndex
    columns: bytes

    @classmethod
    def of(cls, index: Index) -> IndexFiles:
        """Encode an index in both of its forms."""
        return cls(encode_index(index), encode_columns(index))

    def contents(self, directory: Location) -> dict[str, bytes]:
        """The files of one checkpoint by name, ``.metadata`` first."""
        metadata = self.pickled.pickled(directory.name, str(uuid.uuid4()))
        return {METADATA_FNAME: metadata, COLUMNS_FNAME: seal_columns(self.columns, metadata)}


def write_manifest(directory: Location, manifest: Manifest) -> None:
    """Replace the index durably; called by one process when all data files are on disk.

    ``.metadata`` changes in one step; the columns that follow are of no account beside another one.
    """
    for name, content in IndexFiles.of(manifest.to_index()).contents(directory).items():
        store_of(directory).put(directory / name, content)


def stage_index(lock: SaveLock, index: IndexFiles) -> None:
    """Write the index where no reader looks yet; the commit makes it durable and gives it its names."""
    for name, content in index.contents(lock.directory).items():
        store_of(lock.directory).write_soon(lock.staged(name), content)


def stage_native_index(lock: SaveLock, index: Index, metadata: bytes) -> None:
    """The same with a ``.metadata`` that torch's own classes were pickled to, with the content of ``index``."""
    for name, content in ((METADATA_FNAME, metadata), (COLUMNS_FNAME, seal_columns(encode_columns(index), metadata))):
        store_of(lock.directory).write_soon(lock.staged(name), content)


@dataclass(frozen=True, slots=True)
class EncodedIndex:
    """An index as bytes, to be written into any number of checkpoints."""

    before: bytes
    states: bytes
    """Items of ``state_dict_metadata``."""
    places: bytes
    """Items of ``storage_data``."""
    mcore_data: dict[str, Any]

    def pickled(self, checkpoint_id: str, save_id: str) -> bytes:
        """The pickle of torch's ``Metadata`` with this identity."""
        metadata = Metadata(
            state_dict_metadata=_MARKS[0],  # type: ignore[arg-type]
            storage_data=_MARKS[1],
            storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id),
            version=_VERSION,
        )
        if self.mcore_data:  # an attribute that native torch ignores and readers of flattened tensors need
            metadata.mcore_data = self.mcore_data  # type: ignore[attr-defined]
        first, second, third = _split(metadata, 2)
        states, places = b"}(" + self.states + b"u", b"}(" + self.places + b"u"
        return b"".join((self.before, first, states, second, places, third, b"."))


def encode_index(index: Index) -> EncodedIndex:
    """The index in the words of torch's classes."""
    memo = _Memo()
    chunk_a, chunk_b, chunk_c = memo.fill_in(_split(_made(ChunkStorageMetadata, offsets=_MARKS[0], sizes=_MARKS[1]), 2))
    place = memo.fill_in(_split(StorageInfo(_MARKS[0], _MARKS[1], _MARKS[2]), 3))
    indexed = memo.fill_in(_split(_made(MetadataIndex, fqn=_MARKS[0], offset=_MARKS[1], index=_MARKS[2]), 3))
    blank = _made(TensorStorageMetadata, properties=_MARKS[0], size=_MARKS[1], chunks=_MARKS[2])
    tensor_a, tensor_b, tensor_c, tensor_d = memo.fill_in(_split(blank, 3))
    (opaque,) = memo.fill_in([_fragment(BytesStorageMetadata())])
    (nothing,) = memo.fill_in([_fragment(MetadataIndex(_MARKS[0]))])
    object_a, object_b = nothing.split(_fragment(_MARKS[0]))
    sizes = _Sizes(memo.number_of(_fragment(torch.Size())[: -len(b")\x85R")]))
    states: list[bytes] = []
    places: list[bytes] = []

    def place_of(blob: Place) -> bytes:
        file = memo.number_of(_fragment(blob[0]))
        return b"".join((place[0], file, place[1], _integer(blob[1]), place[2], _integer(blob[2]), place[3]))

    for key, blob in index.objects.items():
        name = _fragment(key)
        states += (name, opaque)
        places += (object_a, name, object_b, place_of(blob))
    for key, tensor in index.tensors.items():
        name = _fragment(key)
        properties = memo.number_of(_properties(tensor.dtype))
        states += (name, tensor_a, properties, tensor_b, sizes[tensor.global_shape], tensor_c, b"](")
        for number, (offset, shape, blob) in enumerate(tensor.chunks):
            at = sizes[offset]
            states += (chunk_a, at, chunk_b, sizes[shape], chunk_c)
            places += (indexed[0], name, indexed[1], at, indexed[2], _integer(number), indexed[3], place_of(blob))
        states += (b"e", tensor_d)
    shapes = {key: {ORIGINAL_SHAPE: tuple(shape)} for key, shape in index.unflattened_shapes.items()}
    return EncodedIndex(b"\x80\x02" + memo.definitions(), b"".join(states), b"".join(places), shapes)


def encode_columns(index: Index) -> bytes:
    """The index as columns, without the end that names the ``.metadata`` it belongs to."""
    files: dict[str, int] = {}
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    kind_of: list[int] = []
    num_chunks: list[int] = []
    starts: list[int] = []
    shapes: list[int] = []
    places: list[tuple[int, int, int]] = []

    def add(place: Place) -> None:
        file, start, length = place
        places.append((files.setdefault(file, len(files)), start, length))

    for tensor in index.tensors.values():
        kind_of.append(kinds.setdefault((tensor.dtype, tuple(tensor.global_shape)), len(kinds)))
        num_chunks.append(len(tensor.chunks))
        for start, shape, place in tensor.chunks:
            starts += start
            shapes += shape
            add(place)
    for place in index.objects.values():
        add(place)
    head = {
        "version": VERSION,
        "files": list(files),
        "kinds": list(kinds),
        "tensors": list(index.tensors),
        "objects": list(index.objects),
        "before_flattening": {key: list(shape) for key, shape in index.unflattened_shapes.items()},
        "num_chunks": sum(num_chunks),
    }
    columns = [np.array(column, NUMBER).reshape(-1) for column in (kind_of, num_chunks, places, starts, shapes)]
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + b"".join(one.tobytes() for one in columns)


def seal_columns(columns: bytes, metadata: bytes) -> bytes:
    """The content of `COLUMNS_FNAME` beside this ``.metadata``."""
    return columns + END.pack(MAGIC, len(metadata), crc32(metadata))


class _Memo:
    """Fragments that are defined once, at the beginning, and referred to by number."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, bytes] = {}
        self._definitions: list[bytes] = []

    def number_of(self, fragment: bytes) -> bytes:
        """The bytes that stand for the fragment in the file, the same each time."""
        found = self._numbers.get(fragment)
        if found is None:
            number = len(self._numbers)
            found = self._numbers[fragment] = b"j" + struct.pack("<I", number)
            self._definitions += (fragment, b"r" + struct.pack("<I", number), b"0")
        return found

    def fill_in(self, parts: Iterable[bytes]) -> list[bytes]:
        """The same parts with numbers in the places of classes."""
        return [_GLOBAL.sub(lambda match: self.number_of(match[0]), part) for part in parts]

    def definitions(self) -> bytes:
        return b"".join(self._definitions)


class _Sizes(dict[tuple[int, ...], bytes]):
    """Fragments of sizes, made as they are asked for."""

    def __init__(self, size_class: bytes) -> None:
        super().__init__()
        self._class = size_class

    def __missing__(self, shape: tuple[int, ...]) -> bytes:
        made = self[shape] = b"".join((self._class, b"(", *map(_integer, shape), b"t\x85R"))
        return made


@lru_cache(maxsize=1 << 16)
def _integer(value: int) -> bytes:
    return _fragment(value)


@lru_cache(maxsize=256)
def _properties(dtype: str) -> bytes:
    return _fragment(TensorProperties(dtype=torch_dtype(dtype)))


def _made(kind: type, **fields: Any) -> Any:
    """An object with these values, whatever its constructor would make of them."""
    made: Any = object.__new__(kind)
    made.__dict__.update(fields)
    return made


def _split(value: Any, num_marks: int) -> list[bytes]:
    """The pickle of an object that holds marks, in order: what stands between them."""
    parts, rest = [], _fragment(value)
    for mark in _MARKS[:num_marks]:
        before, found, rest = rest.partition(_fragment(mark))
        assert found, f"torch does not pickle {mark!r} of {value} where it was looked for"
        parts.append(before)
    return [*parts, rest]


def _fragment(value: Any) -> bytes:
    """The pickle of a value without its beginning and end, and without a memo."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=2)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()[2:-1]
