"""Load of a checkpoint: open it, plan what fills the wanted entities, read it.

Opening and planning touch no tensor of the caller. Reading fetches every chunk once and copies its elements into
all tensors that want them, in place and with a cast to their dtype. Both are steps of every rank: until all have
planned without error, no tensor is changed on any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.autograd.graph import increment_version

from remesh.checkpoint.checkpoint_errors import (
    CheckpointFormatError,
    CheckpointingException,
    CheckpointMismatchError,
    CheckpointPathError,
    StoreFailedError,
)
from remesh.checkpoint.formats import zarr_format
from remesh.checkpoint.formats.directory import (
    COMMON_STATE_FNAME,
    CONFIG_FNAME,
    METADATA_FNAME,
    CheckpointingConfig,
    load_common,
    maybe_load_config,
)
from remesh.checkpoint.formats.fetch import ChunkRead, Destination, fetch, read_objects
from remesh.checkpoint.formats.small_blobs import Small, find_small
from remesh.checkpoint.formats.torch_format import BACKEND, BACKEND_VERSION, check_files, read_manifest
from remesh.checkpoint.plan.flattened import reroute
from remesh.checkpoint.plan.manifest import Extent, Manifest
from remesh.checkpoint.plan.reads import Read, Want, find_objects, plan_reads
from remesh.checkpoint.plan.step_names import step_of
from remesh.checkpoint.run.read_apart import ReadApart, mark_shared, settle
from remesh.checkpoint.storage import Location, store_of
from remesh.checkpoint.storage.integrity import BLOCKS_FNAME, Checksums, read_checksums
from remesh.checkpoint.storage.save_lock import is_commit
from remesh.checkpoint.values.entities import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    check_has_values,
)
from remesh.checkpoint.values.nests import count_parents
from remesh.layout import Box, has_own_places
from remesh.layout.from_torch import find_read_only, torch_dtype

READABLE = ((BACKEND, BACKEND_VERSION), (zarr_format.BACKEND, zarr_format.BACKEND_VERSION))
"""Backends and versions that are read here."""
NATIVE = "dcp"
"""The format of native torch, which has no marker."""
_COMMON_STATE_KEY = "common_state"
"""Object that holds the common data in checkpoints of writers from 0.19 on, which have no common.pt."""


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose index has been read. What follows from its fields is kept once asked for: it has no slots."""

    checksums: Checksums
    """Of its files, read once; equal on all ranks that have opened the same checkpoint."""
    manifest: Manifest
    common: dict[str, Any]
    format: str
    """``"torch_dist"``, ``"zarr"`` or ``"dcp"``."""

    @property
    def directory(self) -> Location:
        """Where it lies."""
        return self.checksums.directory

    @property
    def identity(self) -> list[str]:
        """What ranks compare that have opened it: what is equal on all, and its path."""
        return [self.checksums.identity, str(self.directory)]

    @cached_property
    def names(self) -> set[str]:
        """The names of all tensors and objects, and of the dicts and lists that they are in."""
        return {*self.above, *count_parents(self.manifest.objects)}

    @cached_property
    def above(self) -> dict[str, int]:
        """How many tensors have each name, or are in the dict or list of that name."""
        return count_parents(self.manifest.tensors)

    @property
    def is_native(self) -> bool:
        """Whether native torch wrote it: it has no marker file and no common data, and its values stand under names."""
        return self.format == NATIVE

    def stored_keys(self) -> set[str]:
        """Keys of all tensors and objects, objects without the number of their element."""
        return {*self.manifest.tensors, *map(key_of_object, self.manifest.objects)} - {_COMMON_STATE_KEY}


@dataclass(frozen=True, slots=True)
class Fill:
    """What to read for one rank, complete: carrying it out needs no decision."""

    entities: Sequence[ShardedBase]
    """What was asked for; tensors with data to fill."""
    wanted: Sequence[ShardedTensor]
    """Those that the reads are for; all others are small."""
    reads: Sequence[Read]
    """Invariant: they fill every element of ``wanted`` that is stored, once."""
    small: Mapping[str, Sequence[Small]]
    """By file."""
    objects: Sequence[tuple[ShardedObject, Extent]]
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """``(to, from)``, to be copied when all has been read."""
    apart: Sequence[ReadApart]
    """What is put in its place after that."""
    has_bare_objects: bool
    """As in the manifest."""


def open_checkpoint(directory: Location, *, allow_native: bool = False, with_stand_ins: bool = False) -> OpenCheckpoint:
    """Read the index and the common data, this as `load_object` gives it.

    Raises `CheckpointPathError` or `CheckpointFormatError`.
    """
    found, has_common = _format_of(directory, allow_native)
    checksums = read_checksums(directory)
    checksums.check_whole(METADATA_FNAME, COMMON_STATE_FNAME)
    manifest = (
        zarr_format.read_zarr_manifest(directory, checksums)
        if found == zarr_format.BACKEND
        else read_manifest(directory, checksums)
    )
    common = _load_common(checksums, manifest, with_stand_ins=with_stand_ins) if has_common else {}
    return OpenCheckpoint(checksums, manifest, common, found)


def check_is_one(by_rank: Sequence[Sequence[str]]) -> None:
    """Raise `CheckpointMismatchError` unless all ranks load one checkpoint; ``by_rank`` is identity and path, by rank.

    Ranks that look for the newest one by themselves may find two: one is slower to see what has just been saved.
    """
    for rank, (identity, path) in enumerate(by_rank):
        if identity != by_rank[0][0]:
            raise CheckpointMismatchError(
                f"loading a checkpoint: rank 0 loads {by_rank[0][1]} and rank {rank} loads {path}, expected the same "
                "checkpoint on all ranks; let one rank choose for all, as remesh.Checkpoints does"
            )


def read_common(directory: Location) -> dict[str, Any]:
    """The common data alone; the index of tensors is not read unless the common data stands there."""
    found, _ = _format_of(directory, allow_native=False)
    checksums = read_checksums(directory)
    checksums.check_whole(COMMON_STATE_FNAME)
    if _has(directory, COMMON_STATE_FNAME) or found == zarr_format.BACKEND:
        return load_common(directory)
    checksums.check_whole(METADATA_FNAME)
    return _load_common(checksums, read_manifest(directory, checksums))


def is_complete(directory: Location) -> bool:
    """Whether the directory holds a committed checkpoint all of whose files have their full length."""
    return not why_incomplete(directory)


def _step_below(name: str) -> int:
    """The step after which a program named a folder of its checkpoints, Remesh or Megatron; -1 for any other name."""
    step = step_of(name)
    if step is None and name.startswith("iter_") and name.removeprefix("iter_").isdecimal():
        step = int(name.removeprefix("iter_"))
    return -1 if step is None else step


def why_incomplete(directory: Location) -> str:
    """The problem of a checkpoint, as far as its small files and all file sizes show it; empty if there is none.

    Raises `StoreFailedError` where that cannot be known: an older checkpoint is not the newest because of it.
    """
    try:
        checkpoint = open_checkpoint(directory, with_stand_ins=True)
        check_files(directory, list(checkpoint.manifest.extents()))
        checkpoint.checksums.check_sizes()
    except StoreFailedError:
        raise
    except CheckpointingException as raised:
        return str(raised)
    return ""


def plan_fill(
    checkpoint: OpenCheckpoint,
    entities: Sequence[ShardedBase],
    whole: Sequence[tuple[str, torch.Tensor]] = (),
    apart: Sequence[ReadApart] = (),
) -> Fill:
    """Plan what to read for the entities of this rank; descriptions without data get new CPU tensors.

    ``whole`` are tensors that are wanted in full, by key; ``apart`` those that entities with copies stand for. Raises
    `CheckpointMismatchError` for what is not stored, `CheckpointFormatError` for files that are too short.
    """
    check_before_new(checkpoint, entities)
    held = [(one.key, one.data) for one in entities if isinstance(one, ShardedTensor) and one.data is not None]
    check_are_writable([*held, *whole, *((one.key, one.piece.tensor) for one in apart)])
    entities = [_with_data(one) if isinstance(one, ShardedTensor) else one for one in entities]
    objects = [one for one in entities if isinstance(one, ShardedObject)]
    asked, whole, apart = _apart([one for one in entities if isinstance(one, ShardedTensor)], whole, apart)
    tensors, whole, copies = _as_stored(checkpoint.manifest, asked, whole)
    simple = [number for number, one in enumerate(tensors) if _is_simple(one)]
    simply = [(tensors[number].key, tensors[number].data_in_box()) for number in simple] + [*whole]
    small, others = find_small(checkpoint.manifest.tensors, simply)
    looked_at = set(simple) - {simple[number] for number in others if number < len(simple)}
    wanted = [one for number, one in enumerate(tensors) if number not in looked_at]
    wanted += [_whole(*simply[number]) for number in others if number >= len(simple)]
    wants = [Want(one.key, one.global_box(), one.global_shape, one.allow_shape_mismatch) for one in wanted]
    reads = plan_reads(wants, checkpoint.manifest) if wants else ()
    extents = find_objects([one.unique_key for one in objects], checkpoint.manifest) if objects else []
    last = [Extent(file, found[-1].file_start, found[-1].frame.blob_bytes) for file, found in small.items()]
    needed = [*(read.chunk.extent for read in reads), *last, *extents]
    check_files(checkpoint.directory, needed)
    checkpoint.checksums.check_sizes({extent.file for extent in needed})
    pairs = list(zip(objects, extents, strict=True))
    return Fill(entities, wanted, reads, small, pairs, copies, apart, checkpoint.manifest.has_bare_objects)


_Whole = Sequence[tuple[str, torch.Tensor]]


def _apart(
    tensors: Sequence[ShardedTensor], whole: _Whole, apart: Sequence[ReadApart]
) -> tuple[Sequence[ShardedTensor], _Whole, Sequence[ReadApart]]:
    """The tensors, seen to be fit to be filled; those in one memory with others with memory of their own."""
    filled = [*((one.key, _filled(one)) for one in tensors), *whole]
    for key, tensor in filled:
        check_own_places(tensor, key)
        _check_shows_memory(tensor, key)
    if len(filled) < 2:
        return tensors, whole, apart
    found = mark_shared(filled, apart)
    if len(found) > len(apart):
        tensors = [replace(one, data=found[at].copy) if at in found else one for at, one in enumerate(tensors)]
        numbered = enumerate(whole, len(tensors))
        whole = [(key, found[at].copy if at in found else tensor) for at, (key, tensor) in numbered]
    return tensors, whole, list(found.values())


def _as_stored(
    manifest: Manifest, tensors: Sequence[ShardedTensor], whole: _Whole
) -> tuple[Sequence[ShardedTensor], _Whole, Sequence[tuple[torch.Tensor, torch.Tensor]]]:
    """The tensors as they are stored where something is flattened, and copies to make of what was read."""
    before = manifest.unflattened_shapes
    if not before and not any(one.flattened_range is not None for one in tensors):
        return tensors, whole, ()
    asked, copies = reroute([*tensors, *(_whole(key, tensor) for key, tensor in whole if key in before)], manifest)
    return asked, [one for one in whole if one[0] not in before], copies


def _is_simple(one: ShardedTensor) -> bool:
    """Whether all of a tensor is wanted, of exactly the shape that it has."""
    return one.local_shape == one.global_shape and not one.allow_shape_mismatch


def _whole(key: str, tensor: torch.Tensor) -> ShardedTensor:
    shape = tuple(tensor.shape)
    return ShardedTensor(key, tensor, tensor.dtype, shape, shape, (0,) * len(shape), None)


def check_before_new(checkpoint: OpenCheckpoint, entities: Iterable[ShardedBase]) -> None:
    """See that elements are there, in files that are long enough, before memory is taken for those without data."""
    for one in entities:
        if not isinstance(one, ShardedTensor) or one.data is not None or one.allow_shape_mismatch:
            continue
        stored = checkpoint.manifest.tensors.get(one.key)
        if stored is None:
            continue
        num_wanted, num_stored = math.prod(one.local_shape), sum(chunk.box.size for chunk in stored.chunks)
        if num_wanted > num_stored:
            raise CheckpointMismatchError(
                f"loading checkpoint {checkpoint.directory}: {num_wanted} elements of tensor {one.key!r} are wanted, "
                f"found {num_stored} in its chunks; use another checkpoint"
            )
        check_files(checkpoint.directory, [chunk.extent for chunk in stored.chunks])


def run_fill(checkpoint: OpenCheckpoint, fill: Fill) -> list[Any]:
    """Read everything; returns the value of each entity, in their order."""
    fill_tensors(checkpoint, fill)
    objects = iter(_read_objects(checkpoint.checksums, fill))
    return [_filled(one) if isinstance(one, ShardedTensor) else next(objects) for one in fill.entities]


def _filled(tensor: ShardedTensor) -> torch.Tensor:
    assert tensor.data is not None
    return tensor.data.detach()


def fill_tensors(checkpoint: OpenCheckpoint, fill: Fill) -> int:
    """Read the tensors alone; returns the number of bytes that were read of data files."""
    for one in fill.wanted:
        if one.allow_shape_mismatch:
            _filled(one).zero_()
    places = [tensor.data_in_box() for tensor in fill.wanted]
    boxes = [tensor.global_box() for tensor in fill.wanted]
    reads = [_chunk_read_of(read, boxes, places, checkpoint.directory) for read in fill.reads]
    num_bytes = fetch(checkpoint.checksums, reads, fill.small)
    for to, source in fill.copies:
        to.copy_(source)
    if fill.apart:
        settle(fill.apart)
    small = (one.place for of_file in fill.small.values() for one in of_file)
    increment_version([*map(_filled, fill.wanted), *(to for to, _ in fill.copies), *small])
    return num_bytes


def _chunk_read_of(read: Read, boxes: Sequence[Box], places: Sequence[torch.Tensor], directory: Location) -> ChunkRead:
    chunk = read.chunk.box
    destinations = tuple(
        Destination(_within(chunk, copy.box), _part(places[copy.want], boxes[copy.want], copy.box))
        for copy in read.copies
    )
    what = f"a chunk of tensor {read.key!r} in {directory}"
    bare_shape = read.chunk.bare_shape
    return ChunkRead(
        read.chunk.extent, read.dtype, bare_shape or chunk.shape, destinations, what, bare_shape is not None
    )


def _within(frame: Box, box: Box) -> Box:
    return Box.of_shape(box.shape) if box == frame else box.relative_to(frame)


def _part(place: torch.Tensor, held: Box, box: Box) -> torch.Tensor:
    return place if box == held else place[box.relative_to(held).slices()]


def describe_whole(manifest: Manifest) -> dict[str, ShardedTensor]:
    """Every stored tensor as one shard without data, by key; in the shape that it had before it was flattened."""
    described = {}
    for key, stored in manifest.tensors.items():
        shape = manifest.unflattened_shapes.get(key, stored.global_shape)
        zeros, ones = (0,) * len(shape), (1,) * len(shape)
        described[key] = ShardedTensor(key, None, torch_dtype(stored.dtype), shape, shape, zeros, ones)
    return described


def _format_of(directory: Location, allow_native: bool) -> tuple[str, bool]:
    """The format of the checkpoint in a directory, and whether common data belongs to it; raises unless there is one.

    Sharded data has no common data where native torch, or a strategy by itself, has saved it.
    """
    config = find_marker(directory, allow_native)
    if isinstance(config, str):
        return config, False
    if (config.sharded_backend, config.sharded_backend_version) not in READABLE:
        raise CheckpointFormatError(
            "unknown-backend",
            f"loading checkpoint {directory}: its tensors are in format {config.sharded_backend!r} version "
            f"{config.sharded_backend_version}, expected one of {READABLE}; convert it first",
        )
    return config.sharded_backend, True


def find_marker(directory: Location, allow_native: bool) -> CheckpointingConfig | str:
    """The marker of a checkpoint, or the format of one that is allowed to have none; raises unless there is one."""
    store = store_of(directory)
    if not store.is_directory(directory):
        is_file = store.size_of(directory) is not None
        found = "is a file" if is_file else "does not exist"
        hint = "correct the path"
        if is_file and directory.name.endswith(".safetensors"):
            hint = f"make one of the file: remesh ckpt convert {directory} TARGET --to torch_dist"
        raise CheckpointPathError(
            f"loading checkpoint: Checkpoint directory {directory} {found}, expected the directory of a saved "
            f"checkpoint; {hint}"
        )
    config = maybe_load_config(directory)
    if config is None:
        names = [entry.name for entry in store.entries(directory)]
        committed = [name for name in (METADATA_FNAME, BLOCKS_FNAME) if name in names and is_commit(directory, name)]
        # Looked for again: a commit gives the marker its name before it removes the lock files.
        config = maybe_load_config(directory)
    if config is None:
        if allow_native and committed:
            return NATIVE if METADATA_FNAME in committed else zarr_format.BACKEND
        is_native = METADATA_FNAME in committed
        hint = "it was written by native torch, load it with remesh.load" if is_native else "use another checkpoint"
        if below := [name for name in names if _step_below(name) >= 0]:
            hint = f"it holds checkpoints, the newest is {directory / max(below, key=_step_below)}"
        elif any(name.endswith(".safetensors") for name in names):
            hint = f"make one of its safetensors files: remesh ckpt convert {directory} TARGET --to torch_dist"
        raise CheckpointFormatError(
            "not-a-checkpoint",
            f"loading checkpoint: {directory} is not a distributed checkpoint, expected the marker {CONFIG_FNAME} that "
            f"a completed save leaves, found {names[:8]}; {hint}",
        )
    return config


def _has(directory: Location, name: str) -> bool:
    return store_of(directory).size_of(directory / name) is not None


def _load_common(checksums: Checksums, manifest: Manifest, *, with_stand_ins: bool = False) -> dict[str, Any]:
    directory = checksums.directory
    if _has(directory, COMMON_STATE_FNAME):
        return load_common(directory, with_stand_ins=with_stand_ins)
    names = sorted(name for name in manifest.objects if key_of_object(name) == _COMMON_STATE_KEY)
    if not names:
        return load_common(directory)  # raises, naming the file that is missing
    extents = [manifest.objects[names[0]]]
    check_files(directory, extents)
    stored = read_objects(checksums, extents, with_stand_ins=with_stand_ins)[0]
    common = stored[0] if isinstance(stored, list) and stored else stored
    if not isinstance(common, dict):
        raise CheckpointFormatError(
            "bad-common",
            f"loading common data of {directory}: {names[0]!r} is a {type(common).__name__}, expected a dict",
        )
    return common


def key_of_object(unique_key: str) -> str:
    """The key of an object's array; of an object that another program named, this name."""
    try:
        return ShardedObject.empty_from_unique_key(unique_key).key
    except CheckpointingException:
        return unique_key


def _with_data(tensor: ShardedTensor) -> ShardedTensor:
    if tensor.data is None:
        tensor = tensor.without_data()
        tensor.init_data("cpu")
    return tensor


def _read_objects(checksums: Checksums, fill: Fill) -> list[Any]:
    """Read the object of each request from its blob; the i-th request of a name gets element i."""
    directory = checksums.directory
    if not fill.objects:
        return []
    blobs: dict[str, list[Any]] = {}
    num_given: dict[str, int] = {}
    first = {wanted.unique_key: extent for wanted, extent in fill.objects}
    for name, elements in zip(first, read_objects(checksums, list(first.values())), strict=True):
        if fill.has_bare_objects:
            blobs[name] = [elements]
            continue
        if not isinstance(elements, list) or not elements:
            raise CheckpointFormatError(
                "bad-blob", f"reading object {name!r} in {directory}: found {type(elements).__name__}, expected a list"
            )
        blobs[name] = elements
    values = []
    for wanted, _ in fill.objects:
        name = wanted.unique_key
        at = num_given.get(name, 0) if len(blobs[name]) > 1 else 0
        num_given[name] = at + 1
        if at >= len(blobs[name]):
            raise CheckpointFormatError(
                "bad-blob",
                f"reading object {name!r} in {directory}: this rank wants it {at + 1} times, found {len(blobs[name])} "
                "values; ask for it once",
            )
        values.append(blobs[name][at])
    return values


def _check_shows_memory(tensor: torch.Tensor, key: str) -> None:
    """Raise `CheckpointMismatchError` for a tensor whose elements are not what is in its memory."""
    if tensor.is_conj() or tensor.is_neg():
        raise CheckpointMismatchError(
            f"filling tensor {key!r}: it shows the {'conjugate' if tensor.is_conj() else 'negative'} of what is in its "
            "memory, expected a tensor that shows its memory; load into resolve_conj() or resolve_neg() of it"
        )


def check_own_places(tensor: torch.Tensor, key: str) -> None:
    """Raise `CheckpointMismatchError` unless every element has a place of its own in memory."""
    check_has_values(tensor, key)
    if not tensor.is_contiguous() and not has_own_places(tensor.shape, tensor.stride()):
        raise CheckpointMismatchError(
            f"filling tensor {key!r}: its elements overlap in memory (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}), expected distinct memory for each; load into a clone() or contiguous() tensor"
        )


def check_are_writable(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise `CheckpointMismatchError` for memory that may not be written, such as a read-only map of a file."""
    # What torch has allocated itself needs no look, so that a usual load does not go there.
    foreign = [(key, tensor) for key, tensor in tensors if not _is_allocated_by_torch(tensor)]
    if foreign and (key := find_read_only(foreign)) is not None:
        raise CheckpointMismatchError(
            f"filling tensor {key!r}: its memory can only be read, as that of a file mapped with mode 'r', "
            "expected memory that can be written; map it with mode 'c', or give a copy"
        )


def _is_allocated_by_torch(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.untyped_storage().resizable()
