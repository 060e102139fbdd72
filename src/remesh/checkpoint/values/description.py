"""What does a rank tell the others about its entities? Descriptions: entities without data, as JSON.

A description is a short list, so that a hundred thousand of them travel cheaply:
``["tensor", key, dtype, local_shape, global_shape, global_offset, axis_fragmentations, replica_id, num_prepended,
allow_shape_mismatch]`` or ``["object", key, global_shape, global_offset, replica_id]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from remesh.checkpoint.errors import CheckpointMismatchError
from remesh.checkpoint.values.entities import ReplicaId, ShardedBase, ShardedObject, ShardedTensor
from remesh.layout.from_torch import dtype_name, torch_dtype

Description = list[Any]


def describe(entities: Iterable[ShardedBase]) -> list[Description]:
    """One description per entity, in order."""
    return [_describe(entity) for entity in entities]


def entities_from(descriptions: Iterable[Sequence[Any]]) -> list[ShardedBase]:
    """The entities without data that were described."""
    return [_entity_from(description) for description in descriptions]


def _describe(entity: ShardedBase) -> Description:
    if isinstance(entity, ShardedTensor):
        return [
            "tensor",
            entity.key,
            dtype_name(entity.dtype),
            entity.local_shape,
            entity.global_shape,
            entity.global_offset,
            entity.axis_fragmentations,
            entity.replica_id,
            entity.prepend_axis_num,
            entity.allow_shape_mismatch,
        ]
    if isinstance(entity, ShardedObject):
        return ["object", entity.key, entity.global_shape, entity.global_offset, entity.replica_id]
    raise CheckpointMismatchError(
        f"describing the entities of a state dict: expected ShardedTensor or ShardedObject, found "
        f"{type(entity).__name__} with key {entity.key!r}; apply factories first"
    )


def _entity_from(description: Sequence[Any]) -> ShardedBase:
    kind, key, *rest = description
    if kind == "object":
        global_shape, global_offset, replica_id = rest
        return ShardedObject(key, None, tuple(global_shape), tuple(global_offset), _replica_id(replica_id))
    dtype, local_shape, global_shape, global_offset, fragmentations, replica_id, num_prepended, may_differ = rest
    return ShardedTensor(
        key,
        None,
        torch_dtype(dtype),
        tuple(local_shape),
        tuple(global_shape),
        tuple(global_offset),
        None if fragmentations is None else tuple(fragmentations),
        _replica_id(replica_id),
        num_prepended,
        may_differ,
    )


def _replica_id(value: int | list[int]) -> ReplicaId:
    return value if isinstance(value, int) else tuple(value)
