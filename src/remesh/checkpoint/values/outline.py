"""Outlines of the entities of ranks: a form and numbers, so that a million shards are sent and checked in seconds.

Definitions. The *outline* of a rank's entities is a *form*, one row per entity with everything that ranks of the same
program have in common (key, dtype, shapes), and *numbers*: for each row its global offset, then 1 for a main replica
or 0. Ranks with equal forms differ in a row of integers only.

Algorithm of the check, for each key:

1. Ranks with the same form are the columns of one integer matrix; an entity is some rows of it.
2. One main replica that is the whole tensor needs no algebra.
3. Else the boxes of the main replicas must be in bounds and disjoint, and their sizes add up to the tensor's. Whether
   boxes are disjoint is the question of `remesh.layout`, which answers it for arrays of boxes. Tensors that are cut
   alike, as those of most layers are, ask it once.
4. What fails is looked at again entity by entity, for the error's words.

Integers travel in JSON as one text (`pack`): a letter for the narrowest width that fits, then the little-endian
integers in base 64. Equal integers make equal texts, so that texts can be compared in their stead.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.values.description_checks import object_problem, raise_problems, tensor_problem
from remesh.checkpoint.values.entities import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from remesh.layout.box_array import BoxArray, is_disjoint
from remesh.layout.from_torch import dtype_name, torch_dtype

IntArray = npt.NDArray[np.int64]
_WIDTHS = {"b": "<i1", "h": "<i2", "i": "<i4", "q": "<i8"}
"""By letter, as NumPy calls them; the narrowest first."""
FormRow = Sequence[Any]
"""Of a tensor ``(key, dtype, local_shape, global_shape, axis_fragmentations, num_prepended, allow_shape_mismatch)``,
of an object ``(key, global_shape)``."""
_OBJECT_FIELDS = 2


@dataclass(frozen=True, slots=True)
class SentRows:
    """What a rank sends to the others of what it holds."""

    form: Sequence[Sequence[Any]]
    """One row of each thing. JSON, up to tuples that are lists there."""
    numbers: Sequence[int] | IntArray
    """Those of all rows, one behind the other."""

    def parts(self) -> list[Any]:
        """The same for the other ranks, as JSON."""
        return [self.form, pack(self.numbers)]

    @classmethod
    def from_parts(cls, parts: Sequence[Any]) -> Self:
        """What `parts` was made of."""
        form, numbers = parts
        return cls(form, unpack(numbers))


class Outline(SentRows):
    """The outline of a rank's entities."""

    __slots__ = ()

    def entities(self) -> list[ShardedBase]:
        """The entities without data, in order; of their replica ids only whether they are main ones."""
        found, at, numbers = [], 0, np.asarray(self.numbers).tolist()
        for form in self.form:
            stop = at + len(form[1] if len(form) == _OBJECT_FIELDS else form[3]) + 1
            found.append(_entity(form, numbers[at:stop]))
            at = stop
        return found


def outline_of(entities: Iterable[ShardedBase]) -> Outline:
    """The outline of entities, in order; flattened slices and factories must have been taken apart.

    >>> import torch
    >>> outline_of([ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 1, 2))]).numbers
    [4, 1]
    """
    form: list[FormRow] = []
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
    problems are raised together.
    """
    rows_of: dict[str, list[_Row]] = {}
    for group in _groups(outlines):
        for row in group.rows():
            rows_of.setdefault(row.form[0], []).append(row)
    known: dict[Any, bool] = {}
    problems = [found for key, rows in rows_of.items() if (found := _problem(key, rows, known)) is not None]
    if problems:
        raise_problems(problems)


def keys_of(outlines: Sequence[Outline]) -> set[str]:
    """The keys of all entities of all ranks."""
    forms = {id(outline.form): outline.form for outline in outlines}
    return {row[0] for form in forms.values() for row in form}


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Ranks with the same form."""

    form: Sequence[FormRow]
    ranks: list[int]
    numbers: IntArray
    """``[num_numbers, num_ranks]``, by rank of the group."""

    def rows(self) -> list[_Row]:
        sums = self.numbers.sum(axis=1).tolist()
        is_zero: list[bool] = (self.numbers == 0).all(axis=1).tolist()
        rows, at = [], 0
        for form in self.form:
            stop = at + len(form[1] if len(form) == _OBJECT_FIELDS else form[3])
            rows.append(_Row(self, form, at, stop, sums[stop], all(is_zero[at:stop])))
            at = stop + 1
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """One entity on all ranks of a group."""

    group: _Group
    form: FormRow
    start: int
    """First of its rows in the group's numbers."""
    stop: int
    """One past its offsets, where the mark of main replicas stands."""
    num_mains: int
    is_at_origin: bool
    """Whether all its offsets are 0."""

    @property
    def is_object(self) -> bool:
        return len(self.form) == _OBJECT_FIELDS

    @property
    def box_shape(self) -> tuple[int, ...]:
        return (*(1,) * self.form[5], *self.form[2])

    def main_offsets(self) -> IntArray:
        """The offsets of the main replicas, ``[num_axes, num_mains]``."""
        numbers = self.group.numbers
        if self.num_mains == numbers.shape[1]:
            return numbers[self.start : self.stop]
        return numbers[self.start : self.stop, numbers[self.stop] == 1]

    def entities(self) -> list[tuple[int, ShardedBase]]:
        numbers = self.group.numbers[self.start : self.stop + 1].T.tolist()
        return [(rank, _entity(self.form, found)) for rank, found in zip(self.group.ranks, numbers, strict=True)]


def _groups(outlines: Sequence[Outline]) -> list[_Group]:
    groups = []
    for ranks in alike([outline.form for outline in outlines]):
        numbers = np.array([outlines[rank].numbers for rank in ranks], dtype=np.int64).reshape(len(ranks), -1)
        groups.append(_Group(outlines[ranks[0]].form, ranks, np.ascontiguousarray(numbers.T)))
    return groups


def alike(by_rank: Sequence[Any]) -> list[list[int]]:
    """The ranks that sent the same object, by rank."""
    ranks_of: dict[int, list[int]] = {}
    for rank, one in enumerate(by_rank):
        ranks_of.setdefault(id(one), []).append(rank)
    return list(ranks_of.values())


def _problem(key: str, rows: Sequence[_Row], known: dict[Any, bool]) -> str | None:
    if len({row.is_object for row in rows}) > 1:
        return f"{key!r} names both a tensor and an object"
    if rows[0].is_object:
        return None if _objects_fill(rows) else object_problem(key, _by_rank(rows))  # type: ignore[arg-type]
    return None if _tensors_fill(rows, known) else tensor_problem(key, _by_rank(rows))  # type: ignore[arg-type]


def _tensors_fill(rows: Sequence[_Row], known: dict[Any, bool]) -> bool:
    """Whether all is well with a tensor; a no may still be mended by the closer look.

    ``known`` has the answers for tensors that were cut in some way before.
    """
    first = rows[0].form
    shape = tuple(first[3])
    for row in rows[1:]:
        form = row.form
        if form[1] != first[1] or tuple(form[3]) != shape or (form[4] is None) != (first[4] is None):
            return False
    if all(row.is_at_origin and row.box_shape == shape for row in rows):
        return [row.num_mains for row in rows if row.num_mains] == [1]
    offsets = [row.main_offsets() for row in rows]
    cut = (shape, *((row.box_shape, found.tobytes()) for row, found in zip(rows, offsets, strict=True)))
    if cut not in known:
        known[cut] = _boxes_fill(shape, offsets, [row.box_shape for row in rows])
    return known[cut]


def _boxes_fill(shape: tuple[int, ...], offsets: Sequence[IntArray], box_shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether boxes, given as the offsets ``[num_axes, num_boxes]`` of those of one shape, fill a tensor."""
    starts = np.concatenate(offsets, axis=1).T
    sizes = [np.array(one, np.int64)[:, None] for one in box_shapes]
    stops = np.concatenate([found + size for found, size in zip(offsets, sizes, strict=True)], axis=1).T
    if (starts < 0).any() or (stops > np.array(shape, np.int64)).any():
        return False
    has_elements = (starts < stops).all(axis=1)
    boxes = BoxArray(starts[has_elements], stops[has_elements])
    return int(boxes.sizes.sum()) == math.prod(shape) and is_disjoint(boxes)


def _objects_fill(rows: Sequence[_Row]) -> bool:
    shape = tuple(rows[0].form[1])
    if any(tuple(row.form[1]) != shape for row in rows):
        return False
    if shape == (1,) and len(rows) == 1:
        return rows[0].num_mains == 1 and rows[0].is_at_origin
    offsets = np.concatenate([row.main_offsets() for row in rows], axis=1)
    return bool(offsets.shape[1] == math.prod(shape) == np.unique(offsets, axis=1).shape[1])


def _by_rank(rows: Sequence[_Row]) -> list[tuple[int, ShardedBase]]:
    found = [entity for row in rows for entity in row.entities()]
    return sorted(found, key=lambda entity: entity[0])


def _entity(form: FormRow, numbers: Sequence[int]) -> ShardedBase:
    *offset, is_main = numbers
    if len(form) == _OBJECT_FIELDS:
        return ShardedObject(form[0], None, tuple(form[1]), tuple(offset), 1 - is_main)
    key, dtype, local_shape, global_shape, grid, num_prepended, may_differ = form
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


def pack(numbers: Sequence[int] | IntArray) -> str:
    """The integers, each of which fits 64 bits, as text.

    >>> pack([1, 2, 300])
    'hAQACACwB'
    """
    wide = np.asarray(numbers, dtype=np.int64)
    low, high = (int(wide.min()), int(wide.max())) if wide.size else (0, 0)
    letter = next(one for one, kind in _WIDTHS.items() if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return letter + base64.b64encode(wide.astype(_WIDTHS[letter]).tobytes()).decode("ascii")


def unpack(text: str) -> IntArray:
    """What `pack` was given.

    >>> unpack("hAQACACwB").tolist()
    [1, 2, 300]
    """
    return np.frombuffer(base64.b64decode(text[1:]), dtype=_WIDTHS[text[0]]).astype(np.int64)
