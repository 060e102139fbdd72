"""Write plan of a save: what each rank writes, and the index of it. Pure.

Every rank writes its main replicas: first its objects, those of one name together, then its tensors, each in the order
of the state dict. It sends the others what it has written, and where, in columns. The caller chooses the main replica,
or it is chosen here by balancing bytes. Small boxes are not worth balancing: the first rank that holds one writes it,
so that small tensors which ranks do not hold alike come from one rank, and fit together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from typing import Any

import numpy as np

from remesh.checkpoint.plan.manifest import Index, IndexedTensor, Place, StoredBox
from remesh.checkpoint.values.entities import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from remesh.checkpoint.values.outline import IntArray, SentRows, alike, pack, unpack
from remesh.resharding.schedule.senders import assign_whole


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


SMALL_BYTES = 64 << 10
"""A box of no more bytes is small: what a normalisation holds of 16,384 channels, and no matrix of a large model."""


class HeldBoxes(SentRows):
    """The boxes in the memory of one rank, in columns.

    A row is ``(name, shape, bytes)`` and whatever else others shall compare; its numbers are the box's first index.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """What one rank has to do with its boxes."""

    is_mine: list[bool]
    """Of each of them whether this rank writes it."""
    shared: dict[str, list[int]]
    """The numbers of those that other ranks hold, too, in the order of names and starts; by a name of their holders."""


def choose_writers(held: Sequence[HeldBoxes], rank: int) -> Choice:
    """Choose the boxes that each rank writes: every distinct box once, and about equal bytes for all ranks.

    The first rank that holds a small box writes it; the others are shared around that. ``held`` has the boxes of each
    rank, by rank; equal boxes of one name are replicas. All ranks that call this with the same value choose alike.
    """
    holders: dict[_Kind, dict[tuple[int, ...], list[int]]] = {}
    num_bytes: dict[_Kind, int] = {}
    mine: list[tuple[_Kind, tuple[int, ...]]] = []
    for ranks in alike([one.form for one in held]):
        starts = np.array([held[one].numbers for one in ranks], dtype=np.int64).reshape(len(ranks), -1)
        at = 0
        for name, shape, size, *_ in held[ranks[0]].form:
            kind = (name, tuple(shape))
            num_bytes[kind] = size
            of_kind = holders.setdefault(kind, {})
            found = list(map(tuple, starts[:, at : at + len(shape)].tolist()))
            at += len(shape)
            for one, start in zip(ranks, found, strict=True):
                of_kind.setdefault(start, []).append(one)
            if rank in ranks:
                mine.append((kind, found[ranks.index(rank)]))
    load: dict[int, int] = {}
    writers: dict[tuple[_Kind, tuple[int, ...]], int] = {}  # of the boxes that several hold
    large: list[tuple[_Kind, tuple[int, ...]]] = []
    for kind, of_kind in holders.items():
        for start, ranks in of_kind.items():
            if len(ranks) > 1 and num_bytes[kind] > SMALL_BYTES:
                large.append((kind, start))
                continue
            first = ranks[0]
            if len(ranks) > 1:
                writers[kind, start] = first = min(ranks)
            load[first] = load.get(first, 0) + num_bytes[kind]
    if large:
        weights = [num_bytes[kind] for kind, _ in large]
        chosen = assign_whole(weights, [holders[kind][start] for kind, start in large], load)
        writers |= zip(large, chosen, strict=True)
    shared: dict[tuple[int, ...], list[int]] = {}
    for number, (kind, start) in sorted(enumerate(mine), key=itemgetter(1)):
        ranks = holders[kind][start]
        if len(ranks) > 1 and num_bytes[kind]:
            shared.setdefault(tuple(sorted(ranks)), []).append(number)
    names = {ranks: hashlib.sha256(repr(ranks).encode()).hexdigest()[:8] for ranks in shared}
    is_mine = [writers.get(box, rank) == rank for box in mine]
    return Choice(is_mine, {names[ranks]: numbers for ranks, numbers in shared.items()})


@dataclass(frozen=True, slots=True)
class Written:
    """The entries that one rank has written into a file, in columns."""

    file: str
    objects: Sequence[str]
    """Unique keys."""
    tensors: Sequence[Sequence[Any]]
    """``(key, dtype, shape of the box, global shape)`` of each."""
    shapes_before_flattening: Sequence[Sequence[Any]]
    """``(key, global shape)`` of every tensor that is stored flattened."""
    numbers: Sequence[int] | IntArray
    """Of each object its start and length in the file; then of each tensor the offset of its box, start and length."""

    def parts(self) -> list[Any]:
        """The same for the other ranks; what ranks of one program have in common is a part of its own."""
        return [self.file, [self.objects, self.tensors, self.shapes_before_flattening], pack(self.numbers)]

    @classmethod
    def from_parts(cls, parts: Sequence[Any]) -> list[Written]:
        """The files in the ``parts`` that a rank sent, one after the other."""
        files = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
        return [cls(file, row[0], row[1], row[2], unpack(numbers)) for file, row, numbers in files]


def assemble_index(written: Sequence[Written]) -> Index:
    """The index of what all ranks have written. Of a box or object that several ranks wrote, one is taken.

    Ranks that sent the same of their tensors, as the same object, are dealt with at once.
    """
    objects: dict[str, Place] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for one in written:
        for name, start, length in zip(one.objects, *_columns(one.numbers[: 2 * len(one.objects)], 2), strict=True):
            objects.setdefault(name, (one.file, start, length))
        shapes |= {key: tuple(shape) for key, shape in one.shapes_before_flattening}
    tensors: dict[str, IndexedTensor] = {}
    for ranks in alike([one.tensors for one in written]):
        parts = [written[rank] for rank in ranks]
        numbers = np.array([one.numbers[2 * len(one.objects) :] for one in parts], dtype=np.int64)
        files, at = [one.file for one in parts], 0
        for key, dtype, box_shape, global_shape in parts[0].tensors:
            stop = at + len(global_shape)
            *offsets, starts, lengths = numbers[:, at : stop + 2].T.tolist()
            at = stop + 2
            of_tensor = tensors.setdefault(key, IndexedTensor(dtype, tuple(global_shape), []))
            places = zip(files, starts, lengths, strict=True)
            where = zip(*offsets, strict=True) if offsets else repeat(())
            of_tensor.chunks.extend(zip(where, repeat(tuple(box_shape)), places, strict=False))
    for tensor in tensors.values():
        _keep_first(tensor.chunks)
    return Index(tensors, objects, {key: shape for key, shape in shapes.items() if key in tensors})


_Kind = tuple[str, tuple[int, ...]]
"""Name of a tensor and shape of a box."""


def _columns(numbers: Sequence[int] | IntArray, width: int) -> list[list[int]]:
    """Rows of that width, one after the other, as columns."""
    columns: list[list[int]] = np.asarray(numbers, dtype=np.int64).reshape(-1, width).T.tolist()
    return columns


def _keep_first(chunks: list[StoredBox]) -> None:
    """Keep the first of the chunks that have the same offset."""
    if len({offset for offset, _, _ in chunks}) < len(chunks):
        first: dict[tuple[int, ...], StoredBox] = {}
        for chunk in chunks:
            first.setdefault(chunk[0], chunk)
        chunks[:] = first.values()
