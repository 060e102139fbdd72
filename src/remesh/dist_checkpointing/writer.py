"""Saving, carried out: every rank writes its part, then one of them commits.

    gather 1   every rank: split the state dict, see that it can be stored, describe its entities; all check all
    gather 2   rank 0: begin, and the common data
    (strategy) gather 3: every rank its data file; gather 4: rank 0 the index
    gather 5   rank 0: finish, which is the commit

Each gather also carries errors: when a step fails anywhere, all ranks raise the same error there, and the
checkpoint does not exist. Steps 1 to 2 are `begin_save`, 3 to 4 are `store_entities`, which a strategy may replace
or put off, 5 is `commit_save`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remesh.dist_checkpointing.checks import validate_sharding_integrity
from remesh.dist_checkpointing.commit import begin, check_can_save, finish
from remesh.dist_checkpointing.common_data import digest_of, warn_of_differences
from remesh.dist_checkpointing.core import CheckpointingConfig
from remesh.dist_checkpointing.description import describe, entities_from
from remesh.dist_checkpointing.errors import told_as_checkpoint_errors
from remesh.dist_checkpointing.flattened import shapes_before_flattening, stored_form, unflatten_all
from remesh.dist_checkpointing.manifest import Extent
from remesh.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from remesh.dist_checkpointing.storage import Location, store_of
from remesh.dist_checkpointing.strategies.blob import dump_object
from remesh.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from remesh.dist_checkpointing.strategies.torch_format import (
    BACKEND,
    BACKEND_VERSION,
    Payload,
    write_data_file,
    write_manifest,
)
from remesh.dist_checkpointing.writes import assemble_manifest, select_objects, select_tensors
from remesh.reshard.exchange import Group, gather_from, group_rank


@dataclass(frozen=True, slots=True)
class State:
    """What one rank brings to a save: its entities with data, and the common data."""

    entities: Sequence[ShardedBase]
    common: dict[str, Any]
    """Equal on all ranks; that of rank 0 is written."""
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    """Objects that have been serialised already, by unique key."""
    compared: dict[str, Any] | None = None
    """What of the common data is compared across ranks; None compares nothing."""


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of the sharded data, complete: writing it needs nothing else."""

    descriptions: list[Any]
    """Of everything in the payload, in order."""
    shapes_before_flattening: dict[str, tuple[int, ...]]
    payload: Payload


def save_state(
    prepare: Callable[[], State],
    directory: Location,
    group: Group = None,
    *,
    validate: bool = True,
    may_create: bool = False,
) -> None:
    """Write what ``prepare`` returns on each rank as one checkpoint, and commit it.

    Called by every rank of the group; blocks until all have written and the checkpoint is committed. Raises the
    same error on all ranks; then the checkpoint does not exist. The directory must exist unless ``may_create``.
    """
    states: list[State] = []

    def prepare_all() -> State:
        state = prepare()
        states.append(replace(state, blobs=dump_objects(state.entities)))
        return states[0]

    begin_save(prepare_all, directory, group, validate=validate, may_create=may_create)
    store_entities(states[0].entities, directory, group, blobs=states[0].blobs)
    commit_save(directory, group)


def begin_save(
    prepare: Callable[[], State],
    directory: Location,
    group: Group = None,
    *,
    validate: bool = True,
    may_create: bool = False,
) -> None:
    """See that everything can be stored and fits together; then mark the directory and write the common data.

    Called by every rank of the group. Until all ranks have found no fault, nothing on disk is touched.
    """
    doing = f"saving checkpoint {directory}"
    rank = group_rank(group)
    common_blob: list[bytes] = []
    compared: list[dict[str, Any] | None] = []

    def prepare_part() -> list[Any]:
        with told_as_checkpoint_errors(doing):
            if rank == 0:
                check_can_save(directory, may_create=may_create)
            state = prepare()
            compared.append(state.compared)
            if rank == 0:
                common_blob.append(dump_object(state.common, "the common data"))
            return [describe(unflatten_all(state.entities)), digest_of(state.compared)]

    everywhere = gather_from(prepare_part, group, doing)
    if validate:
        validate_sharding_integrity([entities_from(descriptions) for descriptions, _ in everywhere])
    if len({digest for _, digest in everywhere if digest is not None}) > 1:
        warn_of_differences(compared[0], group)

    def begin_once() -> None:
        with told_as_checkpoint_errors(doing):
            if rank == 0:
                begin(directory)
                store_of(directory).put(directory / COMMON_STATE_FNAME, common_blob[0])

    gather_from(begin_once, group, doing)


def store_entities(
    entities: Iterable[ShardedBase],
    directory: Location,
    group: Group = None,
    *,
    blobs: Mapping[str, bytes] | None = None,
) -> None:
    """Write the sharded data and its index; without `commit_save` no reader takes it for a checkpoint.

    Called by every rank of the group. ``blobs`` are objects that have been serialised already, by unique key.
    """
    part: list[Part] = []

    def write() -> list[Any]:
        with told_as_checkpoint_errors(f"saving checkpoint {directory}"):
            part.append(part_of(entities, blobs or {}))
            return write_part(part[0], directory, group_rank(group))

    store_index(write, directory, group)


def store_index(write: Callable[[], list[Any]], directory: Location, group: Group = None) -> None:
    """Gather what ``write`` returns on every rank, which is what `write_part` returned, and write the index of it."""
    doing = f"saving checkpoint {directory}"
    written = gather_from(write, group, doing)

    def index_once() -> None:
        with told_as_checkpoint_errors(doing):
            if group_rank(group) == 0:
                entities = [entities_from(descriptions) for descriptions, _, _ in written]
                extents = [tuple(map(_extents_from_json, parts)) for _, _, parts in written]
                manifest = assemble_manifest(entities, extents)  # type: ignore[arg-type]
                shapes = {key: tuple(shape) for _, told, _ in written for key, shape in told.items()}
                kept = {key: shape for key, shape in shapes.items() if key in manifest.tensors}
                write_manifest(directory, replace(manifest, flattened=frozenset(kept), unflattened_shapes=kept))

    gather_from(index_once, group, doing)


def commit_save(directory: Location, group: Group = None, config: CheckpointingConfig | None = None) -> None:
    """Make the checkpoint exist. Called by every rank of the group, when all else has reached the disk."""
    doing = f"saving checkpoint {directory}"

    def commit_once() -> None:
        with told_as_checkpoint_errors(doing):
            if group_rank(group) == 0:
                finish(directory, config or CheckpointingConfig(BACKEND, BACKEND_VERSION))

    gather_from(commit_once, group, doing)


def part_of(entities: Iterable[ShardedBase], blobs: Mapping[str, bytes]) -> Part:
    """What this rank writes of its entities: main replicas, flattened slices in their stored form."""
    entities = list(entities)
    stored: list[ShardedBase] = []
    for entity in entities:
        if not isinstance(entity, ShardedTensor) or entity.flattened_range is None:
            stored.append(entity)
        elif entity.data_shape[0]:
            stored.append(stored_form(entity))
    objects, tensors = select_objects(stored), select_tensors(stored)
    dumped = {**dump_objects(one for group in objects.values() for one in group if one.unique_key not in blobs)}
    payload = Payload([{**blobs, **dumped}[name] for name in objects], [one.data_in_box() for one in tensors])
    written = [*(one for group in objects.values() for one in group), *tensors]
    return Part(describe(written), shapes_before_flattening(entities), payload)


def write_part(part: Part, directory: Location, rank: int) -> list[Any]:
    """Write this rank's data file durably; returns what the others need to know of it. Calls nobody."""
    extents = write_data_file(directory, rank, part.payload)
    return [part.descriptions, part.shapes_before_flattening, [_extents_to_json(found) for found in extents]]


def dump_objects(entities: Iterable[ShardedBase]) -> dict[str, bytes]:
    """The blobs of the objects that their rank writes, by unique key; `CheckpointMismatchError` for one that cannot."""
    return {
        name: dump_object([element.data for element in group], f"object {name!r}")
        for name, group in select_objects(entities).items()
    }


def _extents_to_json(extents: Sequence[Extent]) -> list[list[Any]]:
    return [[extent.file, extent.file_start, extent.length_bytes] for extent in extents]


def _extents_from_json(extents: Sequence[Sequence[Any]]) -> list[Extent]:
    return [Extent(*extent) for extent in extents]
