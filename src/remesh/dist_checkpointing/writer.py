"""Saving, carried out: every rank writes its part, then one of them commits.

    gather 1   every rank: split the state dict, serialise objects, describe its entities; all check all
    gather 2   rank 0: begin
    gather 3   every rank: write its data file; rank 0 also the common data
    gather 4   rank 0: write .metadata, then finish, which is the commit

Each gather also carries errors: when a step fails anywhere, all ranks raise the same error there, and the
checkpoint does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remesh.dist_checkpointing.commit import begin, check_can_save, finish
from remesh.dist_checkpointing.core import CheckpointingConfig, write_durably
from remesh.dist_checkpointing.description import describe, entities_from
from remesh.dist_checkpointing.errors import told_as_checkpoint_errors
from remesh.dist_checkpointing.manifest import Extent
from remesh.dist_checkpointing.mapping import ShardedBase
from remesh.dist_checkpointing.strategies.blob import dump_object
from remesh.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from remesh.dist_checkpointing.strategies.torch import (
    BACKEND,
    BACKEND_VERSION,
    Payload,
    write_data_file,
    write_manifest,
)
from remesh.dist_checkpointing.validation import validate_sharding_integrity
from remesh.dist_checkpointing.writes import assemble_manifest, select_objects, select_tensors
from remesh.reshard.exchange import Group, gather_from, group_rank


@dataclass(frozen=True, slots=True)
class State:
    """What one rank brings to a save: its entities with data, and the common data."""

    entities: Sequence[ShardedBase]
    common: dict[str, Any]
    """Equal on all ranks; that of rank 0 is written."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """One rank's part, ready to be written."""

    descriptions: list[Any]
    payload: Payload
    common_blob: bytes | None
    """None on ranks that do not write it."""


def save_state(
    prepare: Callable[[], State],
    directory: Path,
    group: Group = None,
    *,
    validate: bool = True,
    may_create: bool = False,
) -> None:
    """Write what ``prepare`` returns on each rank as one checkpoint, and commit it.

    Called by every rank of the group; blocks until all have written and the checkpoint is committed. Raises the
    same error on all ranks; then the checkpoint does not exist. The directory must exist unless ``may_create``.
    """
    doing = f"saving checkpoint {directory}"
    rank = group_rank(group)
    prepared: list[_Prepared] = []

    def prepare_part() -> list[Any]:
        with told_as_checkpoint_errors(doing):
            if rank == 0:
                check_can_save(directory, may_create=may_create)
            prepared.append(_prepare(prepare(), is_first=rank == 0))
            return prepared[0].descriptions

    entities = [entities_from(descriptions) for descriptions in gather_from(prepare_part, group, doing)]
    if validate:
        validate_sharding_integrity(entities)

    def begin_once() -> None:
        with told_as_checkpoint_errors(doing):
            if rank == 0:
                begin(directory)

    def write_part() -> list[list[list[Any]]]:
        with told_as_checkpoint_errors(doing):
            if prepared[0].common_blob is not None:
                write_durably(directory / COMMON_STATE_FNAME, prepared[0].common_blob)
            return [_extents_to_json(part) for part in write_data_file(directory, rank, prepared[0].payload)]

    def commit_once() -> None:
        with told_as_checkpoint_errors(doing):
            if rank == 0:
                extents = [tuple(map(_extents_from_json, parts)) for parts in written]
                write_manifest(directory, assemble_manifest(entities, extents))  # type: ignore[arg-type]
                finish(directory, CheckpointingConfig(BACKEND, BACKEND_VERSION))

    gather_from(begin_once, group, doing)
    written = gather_from(write_part, group, doing)
    gather_from(commit_once, group, doing)


def _prepare(state: State, *, is_first: bool) -> _Prepared:
    objects = select_objects(state.entities)
    blobs = [dump_object([element.data for element in group], f"object {name!r}") for name, group in objects.items()]
    tensors = [tensor.data_in_box() for tensor in select_tensors(state.entities)]
    common_blob = dump_object(state.common, "the common data") if is_first else None
    return _Prepared(describe(state.entities), Payload(blobs, tensors), common_blob)


def _extents_to_json(extents: Sequence[Extent]) -> list[list[Any]]:
    return [[extent.file, extent.file_start, extent.length_bytes] for extent in extents]


def _extents_from_json(extents: Sequence[Sequence[Any]]) -> list[Extent]:
    return [Extent(*extent) for extent in extents]
