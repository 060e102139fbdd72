"""Who writes what? Pure choices of a save: what each rank writes, and the manifest that comes of it.

Every rank writes its main replicas: first its objects, those of one name together, then its tensors, each in the
order of the state dict. Since the order follows from the descriptions alone, a rank that knows all descriptions
needs only the extents of the others to name everything. Which replica is the main one is the caller's word, or is
chosen here by balancing bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remesh.dist_checkpointing.manifest import Chunk, Extent, Manifest, StoredTensor
from remesh.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from remesh.layout import Box
from remesh.layout.from_torch import dtype_name
from remesh.reshard.schedule.senders import assign_whole


def select_objects(entities: Iterable[ShardedBase]) -> dict[str, list[ShardedObject]]:
    """The objects that their rank writes, by unique key; several of one name share a blob."""
    chosen: dict[str, list[ShardedObject]] = {}
    for entity in entities:
        if isinstance(entity, ShardedObject) and is_main_replica(entity.replica_id):
            chosen.setdefault(entity.unique_key, []).append(entity)
    return chosen


def select_tensors(entities: Iterable[ShardedBase]) -> list[ShardedTensor]:
    """The tensors that their rank writes. Empty boxes are left out, except of tensors that are empty themselves."""
    return [
        entity
        for entity in entities
        if isinstance(entity, ShardedTensor)
        and is_main_replica(entity.replica_id)
        and (0 not in entity.local_shape or 0 in entity.global_shape)
    ]


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of a tensor in the memory of one rank."""

    name: str
    box: Box
    num_bytes: int


def choose_writers(held: Sequence[Sequence[HeldBox]]) -> dict[tuple[str, Box], int]:
    """Which rank writes each distinct box, so that all write about as many bytes.

    ``held`` has the boxes of each rank, by rank; equal boxes of one name are replicas. All ranks that call this with
    the same value choose alike.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    num_bytes: dict[tuple[str, Box], int] = {}
    for rank, boxes in enumerate(held):
        for one in boxes:
            holders.setdefault((one.name, one.box), []).append(rank)
            num_bytes[one.name, one.box] = one.num_bytes
    writers = assign_whole([num_bytes[item] for item in holders], list(holders.values()))
    return dict(zip(holders, writers, strict=True))


def assemble_manifest(
    entities: Sequence[Sequence[ShardedBase]], extents: Sequence[tuple[Sequence[Extent], Sequence[Extent]]]
) -> Manifest:
    """The manifest of what was written: ``entities`` and ``(object extents, tensor extents)`` by rank.

    A box or object that two ranks wrote is taken from the lower rank.
    """
    objects: dict[str, Extent] = {}
    first_of: dict[str, ShardedTensor] = {}
    chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
    for of_rank, (object_extents, tensor_extents) in zip(entities, extents, strict=True):
        for name, extent in zip(select_objects(of_rank), object_extents, strict=True):
            objects.setdefault(name, extent)
        for tensor, extent in zip(select_tensors(of_rank), tensor_extents, strict=True):
            first_of.setdefault(tensor.key, tensor)
            chunks.setdefault(tensor.key, {}).setdefault(tensor.global_offset, Chunk(tensor.global_box(), extent))
    tensors = {
        key: StoredTensor(dtype_name(first.dtype), first.global_shape, tuple(chunks[key].values()))
        for key, first in first_of.items()
    }
    return Manifest(tensors, objects)
