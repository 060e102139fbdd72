"""Conversion and merging of checkpoints between formats, by one process.

Definitions. The *contents* of some checkpoints are their tensors, objects and common data together. The *cut* of a
tensor is the list of boxes in which it is to be stored.

1. Every source is opened, whatever its format; contents that contradict each other are refused.
2. Each tensor is cut as it was, or, for a merge, not at all; where a format wants a grid, in cells of the largest box.
3. Box after box is read in bands and written on. The memory in use is that of a band; of a cell for zarr.
4. The target is committed like any save, so that a crash leaves nothing that a reader takes for a checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import (
    CheckpointingException,
    CheckpointMismatchError,
    as_checkpoint_errors,
)
from remesh.checkpoint.formats import zarr_format
from remesh.checkpoint.formats.data_file import DataFile, dump_object, start_blob, write_tensor_in_parts
from remesh.checkpoint.formats.directory import (
    FIXED_FNAMES,
    CheckpointingConfig,
    begin,
    check_can_save,
    data_file_name,
    finish,
    stage_small,
)
from remesh.checkpoint.formats.fetch import read_objects
from remesh.checkpoint.formats.index_files import IndexFiles, stage_index
from remesh.checkpoint.formats.safetensors_format import MAX_FILE_BYTES, is_safetensors, write_tensors
from remesh.checkpoint.formats.torch_format import BACKEND, BACKEND_VERSION
from remesh.checkpoint.plan.manifest import Index, IndexedTensor
from remesh.checkpoint.run.reader import NATIVE, OpenCheckpoint, key_of_object, open_checkpoint
from remesh.checkpoint.run.safetensors import banded, open_safetensors
from remesh.checkpoint.run.stored_values import cut_of, read_bands, read_box, shape_of
from remesh.checkpoint.storage import Location, store_of
from remesh.checkpoint.storage.integrity import BLOCKS_FNAME, Trailer, write_blocks
from remesh.checkpoint.storage.save_lock import SaveLock
from remesh.checkpoint.values.nests import count_parents, diff, items_of
from remesh.layout import Box, itemsize_bytes


class Format(Enum):
    """The format that a conversion writes."""

    TORCH_DIST = "torch_dist"
    ZARR = "zarr"
    SAFETENSORS = "safetensors"
    DCP = "dcp"
    """That of native torch: no marker, common data as objects under their dotted paths."""


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor to be written."""

    checkpoint: OpenCheckpoint
    key: str
    cut: tuple[Box, ...]
    """Disjoint boxes that make up the tensor, as it was stored."""

    @property
    def dtype(self) -> str:
        """Name of its dtype."""
        return self.checkpoint.manifest.tensors[self.key].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape of the tensor."""
        return shape_of(self.checkpoint, self.key)

    @property
    def whole(self) -> Item:
        """The same, in one box."""
        return replace(self, cut=(Box.of_shape(self.shape),))


@dataclass(frozen=True, slots=True)
class Contents:
    """All that some checkpoints hold."""

    tensors: dict[str, Item] = field(default_factory=dict)
    objects: dict[str, OpenCheckpoint] = field(default_factory=dict)
    """By unique key, which checkpoint has it."""
    common: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The size of all elements."""
        return sum(banded(item.checkpoint, item.key).num_bytes for item in self.tensors.values())

    def elements(self) -> Iterator[tuple[str, list[Any]]]:
        """Unique key of each object with its values, in the order of one rank's."""
        for name, checkpoint in self.objects.items():
            value = read_objects(checkpoint.checksums, [checkpoint.manifest.objects[name]], with_stand_ins=True)[0]
            is_list = isinstance(value, list) and not checkpoint.manifest.has_bare_objects
            yield name, value if is_list else [value]


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion."""

    num_tensors: int
    num_objects: int
    has_common: bool
    """Whether there was common data, and the format has a place for it."""
    left_out: str
    """In words, what the format has no place for; empty if nothing."""


def open_any(place: Location) -> OpenCheckpoint:
    """A checkpoint of any format that is read here, by what is found at the place."""
    try:
        return open_checkpoint(place, allow_native=True, with_stand_ins=True)
    except CheckpointingException:
        if is_safetensors(place):
            return open_safetensors(place)
        raise


def gather_contents(checkpoints: Sequence[OpenCheckpoint]) -> Contents:
    """Everything in some checkpoints; `CheckpointMismatchError` where two of them have the same name for something.

    Common data of equal value may be in several.
    """
    contents = Contents()
    for checkpoint in checkpoints:
        tensors = {key: _item_of(checkpoint, key) for key in checkpoint.manifest.tensors}
        objects, common = _objects_of(checkpoint)
        for kind, held, found in (("tensor", contents.tensors, tensors), ("object", contents.objects, objects)):
            if both := sorted(held.keys() & found.keys()):
                raise CheckpointMismatchError(
                    f"merging {', '.join(str(one.directory) for one in checkpoints)}: {len(both)} {kind}s are in more "
                    f"than one, as {both[0]!r}, expected each in one; leave one of the checkpoints out"
                )
        contents.tensors.update(tensors)
        contents.objects.update(objects)
        _merge_common(contents.common, common, checkpoint, ())
    return contents


def convert(
    contents: Contents,
    target: Location,
    to: Format,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> Converted:
    """Write contents as one checkpoint into the directory ``target``, which is created; called by one process.

    ``on_bytes`` is called with the bytes of each part that was written. Raises `CheckpointingException`; then there is
    no checkpoint at the target, and one that was there before is untouched.
    """
    with as_checkpoint_errors(f"writing {target} as {to.value}"):
        if to is Format.SAFETENSORS:
            sources = {name: banded(item.checkpoint, item.key) for name, item in contents.tensors.items()}
            write_tensors(sources, target, max_file_bytes, on_bytes)
            words = [f"{len(contents.objects)} objects"] if contents.objects else []
            words += ["the common data"] if contents.common else []
            return Converted(len(sources), 0, False, " and ".join(words))
        check_can_save(target, may_create=True)
        lock = begin(target)
        if to is Format.ZARR:
            _write_zarr(contents, lock, on_bytes)
        else:
            _write_torch(contents, lock, to is Format.DCP, max_file_bytes, on_bytes)
        return Converted(len(contents.tensors), len(contents.objects), bool(contents.common), "")


def merge(contents: Contents) -> Contents:
    """The same contents, every tensor in one piece."""
    return replace(contents, tensors={key: item.whole for key, item in contents.tensors.items()})


def _write_torch(
    contents: Contents, lock: SaveLock, is_native: bool, max_file_bytes: int, on_bytes: Callable[[int], None]
) -> None:
    target = lock.directory
    index = Index({}, {}, {})
    blobs: dict[str, bytes] = {}  # common data
    if is_native:
        leaves = [(".".join(path), leaf) for path, leaf in _native_leaves(contents.common, ())]
        _check_names(target, [name for name, _ in leaves])
        blobs = {name: dump_object(leaf, f"common value {name!r}") for name, leaf in leaves}
        if taken := sorted(blobs.keys() & {*contents.tensors, *contents.objects}):
            raise CheckpointMismatchError(
                f"writing {target}: common data and a tensor are both called {taken[0]!r}, expected one of the two; "
                "rename one"
            )
    with _Files(lock, max_file_bytes) as files:
        for name, blob in blobs.items():
            index.objects[name] = files.put(blob)
        for name, elements in contents.elements():
            index.objects[name] = files.put(dump_object(elements, f"object {name!r}"))
        for key, item in contents.tensors.items():
            indexed = index.tensors.setdefault(key, IndexedTensor(item.dtype, item.shape, []))
            for box in item.cut:
                bands = read_bands(item.checkpoint, item.key, box)
                place = files.put_tensor(bands, item.dtype, box.shape, on_bytes)
                indexed.chunks.append((box.start, box.shape, place))
    if not is_native:
        stage_small(lock, dump_object(contents.common, "the common data"))
    stage_index(lock, IndexFiles.of(index))
    finish(lock, None if is_native else CheckpointingConfig(BACKEND, BACKEND_VERSION))


class _Files:
    """Data files that follow one another, each as long as it may be."""

    def __init__(self, lock: SaveLock, max_file_bytes: int) -> None:
        self._save_lock = lock
        self._max_file_bytes = max_file_bytes
        self._file: DataFile | None = None
        self._name = ""
        self._num_files = 0

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        self._close(is_good=kind is None)

    def put(self, blob: bytes) -> tuple[str, int, int]:
        """Append the blob of an object; returns file, first byte and length."""
        file = self._open(len(blob))
        start = file.tell()
        file.write(blob)
        return self._name, start, len(blob)

    def put_tensor(
        self, bands: Iterable[torch.Tensor], dtype: str, shape: tuple[int, ...], on_bytes: Callable[[int], None]
    ) -> tuple[str, int, int]:
        """Append the blob of a box, given in parts; returns file, first byte and length."""
        file = self._open(math.prod(shape) * itemsize_bytes(dtype))
        start = start_blob(file, dtype, shape)
        for num_bytes in write_tensor_in_parts(bands, dtype, shape, file):
            on_bytes(num_bytes)
        return self._name, start, file.tell() - start

    def _open(self, num_bytes: int) -> DataFile:
        if self._file is not None and self._file.tell() and self._file.tell() + num_bytes > self._max_file_bytes:
            self._close(is_good=True)
        if self._file is None:
            self._name = data_file_name(self._num_files, self._save_lock.number)
            self._num_files += 1
            self._file = DataFile(self._save_lock.directory / self._name).__enter__()
        return self._file

    def _close(self, is_good: bool) -> None:
        file, self._file = self._file, None
        if file is not None:
            with file:
                if is_good:
                    file.finish()


def _write_zarr(contents: Contents, lock: SaveLock, on_bytes: Callable[[int], None]) -> None:
    target = lock.directory
    tables: dict[str, Trailer] = {}
    arrays = {key: _array_of(key, item) for key, item in contents.tensors.items()}
    zarr_format.check_places(arrays, contents.objects, FIXED_FNAMES)
    for key, item in contents.tensors.items():
        array = arrays[key]
        tables.update(zarr_format.write_array(lock, key, array))
        for _, box in array.cells():
            values = read_box(item.checkpoint, item.key, box)
            tables.update(zarr_format.write_cell(lock, key, array, box, values))
            on_bytes(values.nbytes)
        store_of(target).sync_names(target / key)
    for name, elements in contents.elements():
        if len(elements) != 1:
            raise CheckpointMismatchError(
                f"writing object {name!r} as zarr: one rank stored {len(elements)} values under that name, expected "
                "one; convert to torch_dist"
            )
        tables.update(zarr_format.write_object(lock, name, dump_object(elements[0], f"object {name!r}")))
    write_blocks(lock.staged(BLOCKS_FNAME), tables)
    stage_small(lock, dump_object(contents.common, "the common data"))
    finish(lock, CheckpointingConfig(zarr_format.BACKEND, zarr_format.BACKEND_VERSION))


def _array_of(key: str, item: Item) -> zarr_format.Array:
    boxes = item.cut or (Box.of_shape(item.shape),)
    largest = tuple(max(sizes) for sizes in zip(*(box.shape for box in boxes), strict=True))
    return zarr_format.array_of(key, item.dtype, item.shape, largest)


def _item_of(checkpoint: OpenCheckpoint, key: str) -> Item:
    item = Item(checkpoint, key, tuple(cut_of(checkpoint, key)))
    num_elements, num_stored = math.prod(item.shape), sum(box.size for box in item.cut)
    if num_stored < num_elements:
        raise CheckpointMismatchError(
            f"reading {checkpoint.directory}: tensor {key!r} of shape {item.shape} has {num_elements} elements, "
            f"found {num_stored} in its chunks; use another checkpoint"
        )
    return item


def _objects_of(checkpoint: OpenCheckpoint) -> tuple[dict[str, OpenCheckpoint], dict[str, Any]]:
    """Objects of a checkpoint, and its common data, which native torch keeps as objects under dotted paths."""
    if checkpoint.format != NATIVE:
        keys = checkpoint.stored_keys()
        names = [name for name in checkpoint.manifest.objects if key_of_object(name) in keys]
        return dict.fromkeys(names, checkpoint), dict(checkpoint.common)
    objects: dict[str, OpenCheckpoint] = {}
    common: dict[str, Any] = {}
    for name, extent in checkpoint.manifest.objects.items():
        if key_of_object(name) != name:
            objects[name] = checkpoint
            continue
        *above, last = name.split(".")
        node = common
        for part in above:
            below = node.setdefault(part, {})
            node = below if isinstance(below, dict) else node.setdefault(f"{part}.", {})
        node[last] = read_objects(checkpoint.checksums, [extent], with_stand_ins=True)[0]
    return objects, common


def _check_names(target: Location, names: Sequence[str]) -> None:
    """Raise `CheckpointMismatchError` where a name stands for two values, or for a value and a dict or list."""
    above = count_parents(name.rpartition(".")[0] for name in names)
    for name, count in Counter(names).items():
        if count > 1 or name in above:
            raise CheckpointMismatchError(
                f"writing {target}: two common values would both be called {name!r}, for native torch has names in the "
                "place of keys, expected one value for each; rename one of the keys"
            )


def _native_leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Common data as native torch takes it apart: dicts, and lists that hold a dict somewhere. What is empty stays."""
    if (isinstance(node, dict) and (node or not path)) or (isinstance(node, list) and not _is_flat(node)):
        for key, value in items_of(node):
            yield from _native_leaves(value, (*path, str(key)))
    else:
        yield path, node


def _is_flat(values: list[Any]) -> bool:
    return not any(isinstance(one, dict) or (isinstance(one, list) and not _is_flat(one)) for one in values)


def _merge_common(
    into: dict[str, Any], found: Mapping[str, Any], checkpoint: OpenCheckpoint, path: tuple[str, ...]
) -> None:
    for key, value in found.items():
        if key not in into:
            into[key] = value
        elif isinstance(into[key], dict) and isinstance(value, dict):
            _merge_common(into[key], value, checkpoint, (*path, key))
        elif any(diff({key: into[key]}, {key: value})):
            raise CheckpointMismatchError(
                f"merging {checkpoint.directory}: its common data at {(*path, key)} differs from that of an earlier "
                "checkpoint, expected equal values; leave one of the checkpoints out"
            )
