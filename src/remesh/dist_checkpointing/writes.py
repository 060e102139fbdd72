"""Who writes what? Pure choices of a save: what each rank writes, and the index that comes of it.

Every rank writes its main replicas: first its objects, those of one name together, then its tensors, each in the
order of the state dict. It tells the others what it has written, and where, in columns. Which replica is the main one
is the caller's word, or is chosen here by balancing bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from remesh.dist_checkpointing.manifest import Index, IndexedTensor, Place, StoredBox
from remesh.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from remesh.layout import Box
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


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank has written, in columns. All of it is JSON, up to tuples that are lists there."""

    file: str
    """Its data file; empty when there was nothing to write."""
    objects: Sequence[str]
    """Unique keys."""
    tensors: Sequence[Sequence[Any]]
    """``(key, dtype, shape of the box, global shape)`` of each."""
    shapes_before_flattening: Sequence[Sequence[Any]]
    """``(key, global shape)`` of every tensor that is stored flattened."""
    numbers: Sequence[int]
    """Of each object its start and length in the file; then of each tensor the offset of its box, start and length."""

    def parts(self) -> list[Any]:
        """The same for the other ranks; what ranks of one program have in common is a part of its own."""
        return [self.file, [self.objects, self.tensors, self.shapes_before_flattening], self.numbers]

    @classmethod
    def from_parts(cls, parts: Sequence[Any]) -> Written:
        """What `parts` was made of."""
        file, (objects, tensors, shapes), numbers = parts
        return cls(file, objects, tensors, shapes, numbers)


def assemble_index(written: Sequence[Written]) -> Index:
    """The index of what all ranks have written. A box or object that two ranks wrote is taken from the lower rank."""
    objects: dict[str, Place] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    chunks: dict[str, dict[tuple[int, ...], StoredBox]] = {}
    plain_rows: dict[int, list[tuple[str, tuple[int, ...], int, dict[tuple[int, ...], StoredBox]]]] = {}
    for one in written:
        file, numbers, at = one.file, one.numbers, 2 * len(one.objects)
        for number, name in enumerate(one.objects):
            objects.setdefault(name, (file, numbers[2 * number], numbers[2 * number + 1]))
        if id(one.tensors) not in plain_rows:  # ranks of one program share their rows
            rows = plain_rows[id(one.tensors)] = []
            for key, dtype, box_shape, global_shape in one.tensors:
                kinds.setdefault(key, (dtype, tuple(global_shape)))
                rows.append((key, tuple(box_shape), len(global_shape), chunks.setdefault(key, {})))
        for _, shape, ndim, found in plain_rows[id(one.tensors)]:
            stop = at + ndim
            offset = tuple(numbers[at:stop])
            if offset not in found:
                found[offset] = (offset, shape, (file, numbers[stop], numbers[stop + 1]))
            at = stop + 2
        shapes |= {key: tuple(shape) for key, shape in one.shapes_before_flattening}
    tensors = {key: IndexedTensor(*kinds[key], list(found.values())) for key, found in chunks.items()}
    return Index(tensors, objects, {key: shape for key, shape in shapes.items() if key in tensors})
