"""How are a million shards of a thousand ranks told and checked in seconds? As outlines: a form, and numbers.

Definitions. The *outline* of a rank's entities is a *form*, one row per entity with everything that ranks of the same
program have in common (key, dtype, shapes), and *numbers*: for each row its global offset, then 1 for a main replica
or 0. Ranks with equal forms differ in a row of integers only.

Algorithm of the check, for each key:

1. Ranks with the same form are the rows of one integer matrix; an entity is some columns of it.
2. One main replica that is the whole tensor needs no algebra.
3. Else the boxes of the main replicas must be in bounds and disjoint, and their sizes add up to the tensor's. Whether
   boxes are disjoint is the question of `remesh.layout`, which answers it for arrays of boxes.
4. What fails is looked at again entity by entity, for the error's words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from remesh.dist_checkpointing.checks import object_problem, raise_problems, tensor_problem
from remesh.dist_checkpointing.errors import CheckpointMismatchError
from remesh.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from remesh.layout.box_array import BoxArray, is_disjoint
from remesh.layout.from_torch import dtype_name, torch_dtype

Row = Sequence[Any]
"""Of a tensor ``(key, dtype, local_shape, global_shape, axis_fragmentations, num_prepended, allow_shape_mismatch)``,
of an object ``(key, global_shape)``."""
_OBJECT_FIELDS = 2


@dataclass(frozen=True, slots=True)
class Outline:
    """What a rank tells of its entities; both parts are JSON, up to tuples that are lists there."""

    form: Sequence[Row]
    numbers: Sequence[int]
    """For each row as many offsets as its global shape has axes, then whether it is a main replica."""


def outline_of(entities: Iterable[ShardedBase]) -> Outline:
    """The outline of entities, in order; flattened slices and factories must have been taken apart.

    >>> import torch
    >>> outline_of([ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 1, 2))]).numbers
    [4, 1]
    """
    form: list[Row] = []
    numbers: list[int] = []
    for one in entities:
        if isinstance(one, ShardedTensor):
            place = (one.local_shape, one.global_shape, one.axis_fragmentations)
            form.append((one.key, dtype_name(one.dtype), *place, one.prepend_axis_num, one.allow_shape_mismatch))
        elif isinstance(one, ShardedObject):
            form.append((one.key, one.global_shape))
        else:
            raise CheckpointMismatchError(
                f"outlining the entities of a state dict: expected ShardedTensor or ShardedObject, found "
                f"{type(one).__name__} with key {one.key!r}; apply factories first"
            )
        numbers += one.global_offset
        numbers.append(int(is_main_replica(one.replica_id)))
    return Outline(form, numbers)


def check_outlines(outlines: Sequence[Outline]) -> None:
    """Raise `CheckpointMismatchError` unless the main replicas of all ranks fill everything exactly once.

    ``outlines`` has one for each rank, by rank. Ranks whose forms are the same object cost next to nothing more. All
    problems are told together.
    """
    columns_of: dict[str, list[_Column]] = {}
    for group in _groups(outlines):
        for column in group.columns():
            columns_of.setdefault(column.row[0], []).append(column)
    raise_problems([found for key, columns in columns_of.items() if (found := _problem(key, columns)) is not None])


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Ranks with the same form."""

    form: Sequence[Row]
    ranks: list[int]
    numbers: npt.NDArray[np.int64]
    """``[num_ranks, num_numbers]``, by rank of the group."""

    def columns(self) -> list[_Column]:
        sums = self.numbers.sum(axis=0).tolist()
        is_zero: list[bool] = (self.numbers == 0).all(axis=0).tolist()
        columns, at = [], 0
        for row in self.form:
            stop = at + len(row[1] if len(row) == _OBJECT_FIELDS else row[3])
            columns.append(_Column(self, row, at, stop, sums[stop], all(is_zero[at:stop])))
            at = stop + 1
        return columns


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """One entity on all ranks of a group."""

    group: _Group
    row: Row
    start: int
    """First of its columns in the group's numbers."""
    stop: int
    """One past its offsets, where the mark of main replicas stands."""
    num_mains: int
    is_at_origin: bool
    """Whether all its offsets are 0."""

    @property
    def is_object(self) -> bool:
        return len(self.row) == _OBJECT_FIELDS

    @property
    def box_shape(self) -> tuple[int, ...]:
        return (*(1,) * self.row[5], *self.row[2])

    def main_offsets(self) -> npt.NDArray[np.int64]:
        numbers = self.group.numbers
        return numbers[numbers[:, self.stop] == 1, self.start : self.stop]

    def entities(self) -> list[tuple[int, ShardedBase]]:
        numbers = self.group.numbers[:, self.start : self.stop + 1].tolist()
        return [(rank, _entity(self.row, found)) for rank, found in zip(self.group.ranks, numbers, strict=True)]


def _groups(outlines: Sequence[Outline]) -> list[_Group]:
    ranks_of: dict[int, list[int]] = {}
    for rank, outline in enumerate(outlines):
        ranks_of.setdefault(id(outline.form), []).append(rank)
    groups = []
    for ranks in ranks_of.values():
        form = outlines[ranks[0]].form
        numbers = np.array([outlines[rank].numbers for rank in ranks], dtype=np.int64).reshape(len(ranks), -1)
        groups.append(_Group(form, ranks, numbers))
    return groups


def _problem(key: str, columns: Sequence[_Column]) -> str | None:
    if len({column.is_object for column in columns}) > 1:
        return f"{key!r} names both a tensor and an object"
    if columns[0].is_object:
        return None if _objects_fill(columns) else object_problem(key, _by_rank(columns))  # type: ignore[arg-type]
    return None if _tensors_fill(columns) else tensor_problem(key, _by_rank(columns))  # type: ignore[arg-type]


def _tensors_fill(columns: Sequence[_Column]) -> bool:
    """Whether all is well with a tensor; a no may still be mended by the closer look."""
    first = columns[0].row
    shape = tuple(first[3])
    for column in columns[1:]:
        row = column.row
        if row[1] != first[1] or tuple(row[3]) != shape or (row[4] is None) != (first[4] is None):
            return False
    if all(column.is_at_origin and column.box_shape == shape for column in columns):
        return [column.num_mains for column in columns if column.num_mains] == [1]
    starts = np.concatenate([column.main_offsets() for column in columns])
    stops = np.concatenate([column.main_offsets() + np.array(column.box_shape, np.int64) for column in columns])
    if (starts < 0).any() or (stops > np.array(shape, np.int64)).any():
        return False
    has_elements = (starts < stops).all(axis=1)
    boxes = BoxArray(starts[has_elements], stops[has_elements])
    return int(boxes.sizes.sum()) == math.prod(shape) and is_disjoint(boxes)


def _objects_fill(columns: Sequence[_Column]) -> bool:
    shape = tuple(columns[0].row[1])
    if any(tuple(column.row[1]) != shape for column in columns):
        return False
    if shape == (1,) and len(columns) == 1:
        return columns[0].num_mains == 1 and columns[0].is_at_origin
    offsets = np.concatenate([column.main_offsets() for column in columns])
    return bool(len(offsets) == math.prod(shape) == len(np.unique(offsets, axis=0)))


def _by_rank(columns: Sequence[_Column]) -> list[tuple[int, ShardedBase]]:
    found = [entity for column in columns for entity in column.entities()]
    return sorted(found, key=lambda entity: entity[0])


def _entity(row: Row, numbers: Sequence[int]) -> ShardedBase:
    *offset, is_main = numbers
    if len(row) == _OBJECT_FIELDS:
        return ShardedObject(row[0], None, tuple(row[1]), tuple(offset), 1 - is_main)
    key, dtype, local_shape, global_shape, grid, num_prepended, may_differ = row
    return ShardedTensor(
        key,
        None,
        torch_dtype(dtype),
        tuple(local_shape),
        tuple(global_shape),
        tuple(offset),
        None if grid is None else tuple(grid),
        1 - is_main,
        num_prepended,
        may_differ,
    )
