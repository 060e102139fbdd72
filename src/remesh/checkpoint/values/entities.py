"""Entities of a sharded state dict: the leaves that place local data in the global state.

Definitions. A *sharded state dict* is a nest of dicts and lists. Its leaves are

1. `ShardedTensor`: a local tensor as one box of a global tensor;
2. `ShardedObject`: one element of an array of arbitrary objects;
3. `ShardedTensorFactory`: a tensor with a function that expands it into a nest of such leaves, and its inverse;
4. `LocalNonpersistentObject`: not saved; put back into the result of a load;
5. anything else: *common* data, the same on all ranks, saved once.

The identity of an entity in the checkpoint is its ``key``, not its place in the dict. ``replica_id`` tells copies
apart: the *main* replica (0, or zeros only) is the one that is written.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from remesh.checkpoint.checkpoint_errors import CheckpointingException, CheckpointMismatchError
from remesh.layout import Box
from remesh.layout.from_torch import why_without_memory

StateDict = dict[str, Any]
CommonStateDict = dict[str, Any]
ShardedStateDict = dict[str, Any]
ReplicaId = int | tuple[int, ...]
FactoryBuildFn = Callable[[str, torch.Tensor | None, ReplicaId, slice | None], Any]
FactoryMergeFn = Callable[[Any], Any]

_OBJECT_INFIX = "/shard_"
_Place = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether this copy is the one that is written."""
    return replica_id == 0 if isinstance(replica_id, int) else all(part == 0 for part in replica_id)


def _place_on_grid(
    key: str, shape: tuple[int, ...], rank_offsets: Sequence[tuple[int, int, int]], prepend_axis_num: int
) -> _Place:
    """Global shape, global offset and fragmentations of a part of this shape."""
    box_shape = (1,) * prepend_axis_num + shape
    ndim = len(box_shape)
    coordinates, fragmentations = [0] * ndim, [1] * ndim
    for axis, rank, num_parts in rank_offsets:
        if not (0 <= axis < ndim and num_parts >= 1 and 0 <= rank < num_parts):
            raise CheckpointingException(
                f"Invalid rank offsets: describing tensor {key!r} with (axis {axis}, rank {rank}, parts "
                f"{num_parts}); expected 0 <= axis < {ndim} and 0 <= rank < parts"
            )
        coordinates[axis], fragmentations[axis] = rank, num_parts
    return (
        tuple(n * parts for n, parts in zip(box_shape, fragmentations, strict=True)),
        tuple(n * at for n, at in zip(box_shape, coordinates, strict=True)),
        tuple(fragmentations),
    )


class ShardedBase(ABC):
    """Anything sharded: a ``key``, some ``data`` to save or fill, and which copy it is."""

    key: str
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise `CheckpointingException` when the fields contradict each other."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """A copy whose ``data`` is None."""


@dataclass
class ShardedTensor(ShardedBase):
    """A local tensor as one box of a global tensor, on a regular grid or anywhere.

    >>> piece = ShardedTensor.from_rank_offsets("weight", torch.zeros(32), (0, 1, 4))
    >>> piece.global_shape, piece.global_offset
    ((128,), (32,))
    """

    key: str
    """Name of the global tensor in the checkpoint."""
    data: torch.Tensor | None = field(repr=False)
    """The local tensor: what is saved, or filled in place by a load; None for a description only."""
    dtype: torch.dtype
    """Invariant: the dtype of ``data``."""
    local_shape: tuple[int, ...]
    """Shape of ``data``, without prepended axes."""
    global_shape: tuple[int, ...]
    """Invariant: one size per prepended axis, then one per dim of ``data``."""
    global_offset: tuple[int, ...]
    """First global index of the box, in each axis of ``global_shape``."""
    axis_fragmentations: tuple[int, ...] | None
    """Number of grid parts in each axis of ``global_shape``; None for a box that lies on no grid."""
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    """How many leading axes the global tensor has and ``data`` lacks; the box spans one index of each."""
    allow_shape_mismatch: bool = False
    """Whether the stored tensor may have another global shape: overlap is loaded, the rest is zero."""
    flattened_range: slice | None = None
    """If given, ``data`` is 1-D and holds these elements of the local shard, flattened row-major.
    Invariant: ``0 <= start <= stop <= number of elements of local_shape``, no step, on a regular grid."""

    def __post_init__(self) -> None:
        self.local_shape = tuple(self.local_shape)
        self.global_shape = tuple(self.global_shape)
        self.global_offset = tuple(self.global_offset)
        if self.axis_fragmentations is not None:
            self.axis_fragmentations = tuple(self.axis_fragmentations)
        self.validate_metadata_integrity()

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """Part ``rank`` of ``num_parts`` equal parts of a global tensor, for each ``(axis, rank, num_parts)``.

        Axes are those of the global tensor: ``prepend_axis_num`` axes of size 1 come before the dims of ``data``.
        Axes not named are not split.
        """
        if flattened_range is not None:
            raise ValueError(
                f"describing tensor {key!r} from rank offsets: flattened_range must be None; describe a flattened "
                "slice with from_rank_offsets_flat"
            )
        place = _place_on_grid(key, tuple(data.shape), rank_offsets, prepend_axis_num)
        return cls(key, data, data.dtype, tuple(data.shape), *place, replica_id, prepend_axis_num, **init_kwargs)

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: Sequence[int],
        *rank_offsets: tuple[int, int, int],
        flattened_range: slice | None = None,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """The elements ``flattened_range`` of part ``rank`` of ``num_parts``, which has ``non_flat_local_shape``.

        ``data`` is 1-D and holds these elements; optimizers that flatten parameters keep such slices.
        """
        if flattened_range is None:
            raise CheckpointingException(
                f"describing tensor {key!r} as a flattened slice: flattened_range is None, expected a slice of the "
                "flattened local shard; describe a whole shard with from_rank_offsets"
            )
        shape = tuple(non_flat_local_shape)
        place = _place_on_grid(key, shape, rank_offsets, prepend_axis_num)
        init_kwargs["flattened_range"] = flattened_range
        return cls(key, data, data.dtype, shape, *place, replica_id, prepend_axis_num, **init_kwargs)

    @property
    def has_regular_grid(self) -> bool:
        """Whether the box is a cell of a regular grid over the global tensor."""
        return self.axis_fragmentations is not None

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Shape of the box in the global tensor: one index of each prepended axis, then ``local_shape``."""
        return (1,) * self.prepend_axis_num + self.local_shape

    def global_box(self) -> Box:
        """The box of the global tensor that ``data`` holds."""
        return Box.at(self.global_offset, self.box_shape)

    def data_in_box(self) -> torch.Tensor:
        """``data`` seen in the shape of the box; the same storage, whatever its strides."""
        if self.flattened_range is not None:
            raise CheckpointingException(
                f"looking at tensor {self.key!r} as a box: it is the flattened slice {self.flattened_range}; take it "
                "apart with remesh.checkpoint.plan.flattened.unflatten"
            )
        if self.data is None:
            raise CheckpointingException(f"using tensor {self.key!r}: it is a description without data")
        data = self.data.detach()
        return data[(None,) * self.prepend_axis_num] if self.prepend_axis_num else data

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Position of the box in the grid, one number per axis of ``global_shape``."""
        if not self.has_regular_grid:
            raise CheckpointMismatchError(f"finding the grid cell of tensor {self.key!r}: it lies on no regular grid")
        return tuple(at // n if n else 0 for at, n in zip(self.global_offset, self.box_shape, strict=True))

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Number of grid cells in each axis, for a grid with which the global tensor divides evenly."""
        if self.axis_fragmentations is None:
            raise CheckpointingException(f"counting the grid cells of tensor {self.key!r}: it lies on no regular grid")
        for size, parts in zip(self.global_shape, self.axis_fragmentations, strict=True):
            if not self.allow_shape_mismatch and size % parts:
                raise CheckpointingException(
                    f"counting the grid cells of tensor {self.key!r}: {parts} parts do not divide size {size} of "
                    f"global_shape {self.global_shape}"
                )
        return self.axis_fragmentations

    def global_slice(self) -> tuple[int | slice, ...]:
        """Index of the box in the global tensor: an int for each prepended axis, then slices."""
        return (
            *self.global_offset[: self.prepend_axis_num],
            *self.global_box().slices()[self.prepend_axis_num :],
        )

    def local_coordinates(self) -> tuple[np.ndarray, ...]:
        """The indices of the elements of a flattened slice in the local shard: one array per dim."""
        if self.flattened_range is None:
            raise CheckpointMismatchError(f"listing the elements of tensor {self.key!r}: it is not flattened")
        flat = np.arange(self.flattened_range.start, self.flattened_range.stop)
        return tuple(np.unravel_index(flat, self.local_shape))

    def global_coordinates(self) -> tuple[np.ndarray, ...]:
        """The indices of the elements of a flattened slice in the global tensor: one array per axis."""
        local = self.local_coordinates()
        num_elements = len(local[0]) if local else 0
        inner = (*(np.zeros(num_elements, dtype=np.int64) for _ in range(self.prepend_axis_num)), *local)
        return tuple(at + index for at, index in zip(self.global_offset, inner, strict=True))

    def without_data(self) -> ShardedTensor:
        return replace(self, data=None)

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of ``data``: ``local_shape``, or the length of the flattened slice."""
        if self.flattened_range is None:
            return self.local_shape
        return (self.flattened_range.stop - self.flattened_range.start,)

    def init_data(self, device: torch.device | str, init_fn: Callable[..., torch.Tensor] = torch.empty) -> None:
        """Give a description its own tensor, made by ``init_fn(shape, dtype=, device=)``; keep data that is there."""
        if self.data is None:
            self.data = init_fn(self.data_shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """The part ``[start, start + length)`` of dim ``dim`` of the data, as a piece of an equally narrowed tensor.

        The grid stays: every rank is taken to narrow alike, so global shape and offset shrink in proportion. Of a
        flattened slice only dim 0 can be narrowed; the result is empty when it has none of those elements.
        """
        axis, size = dim + self.prepend_axis_num, self.local_shape[dim]
        if size == 0 or self.global_shape[axis] % size or self.global_offset[axis] % size:
            raise CheckpointMismatchError(
                f"narrowing tensor {self.key!r} in dim {dim}: local size {size} does not divide global size "
                f"{self.global_shape[axis]} and offset {self.global_offset[axis]}"
            )

        def scaled(values: tuple[int, ...]) -> tuple[int, ...]:
            return (*values[:axis], values[axis] // size * length, *values[axis + 1 :])

        narrowed = replace(
            self,
            data=None,
            flattened_range=None,
            local_shape=(*self.local_shape[:dim], length, *self.local_shape[dim + 1 :]),
            global_shape=scaled(self.global_shape),
            global_offset=scaled(self.global_offset),
        )
        if self.flattened_range is not None:
            return self._narrow_flattened(narrowed, dim, start)
        if self.data is not None:
            narrowed.data = self.data.narrow(dim, start, length)
        return [narrowed]

    def _narrow_flattened(self, narrowed: ShardedTensor, dim: int, start: int) -> list[ShardedTensor]:
        assert self.flattened_range is not None
        if dim != 0:
            raise CheckpointMismatchError(
                f"narrowing tensor {self.key!r} in dim {dim}: it is a flattened slice, expected dim 0, where the "
                "narrowed part is one run"
            )
        row = math.prod(self.local_shape[1:])
        first, held = start * row, self.flattened_range
        begin, end = max(held.start, first), min(held.stop, first + narrowed.local_shape[0] * row)
        if begin >= end:
            return []
        data = None if self.data is None else self.data[begin - held.start : end - held.start]
        return [replace(narrowed, data=data, flattened_range=slice(begin - first, end - first))]

    def validate_metadata_integrity(self) -> None:
        doing = f"describing tensor {self.key!r}"
        if self.flattened_range is not None:
            self._check_flattened(doing, self.flattened_range)
        if self.data is not None and self.data.dtype != self.dtype:
            raise CheckpointingException(f"{doing}: the data has dtype {self.data.dtype}, expected {self.dtype}")
        if self.data is not None and tuple(self.data.shape) != self.data_shape:
            what = "local_shape" if self.flattened_range is None else "the length of flattened_range,"
            raise CheckpointingException(
                f"{doing}: the data has shape {tuple(self.data.shape)}, expected {what} {self.data_shape}"
            )
        ndim = len(self.local_shape) + self.prepend_axis_num
        if not len(self.global_shape) == len(self.global_offset) == ndim:
            raise CheckpointingException(
                f"{doing}: global_shape {self.global_shape} and global_offset {self.global_offset} must have {ndim} "
                f"axes, {self.prepend_axis_num} prepended ones and those of local_shape {self.local_shape}"
            )
        if self.axis_fragmentations is not None:
            self._check_grid(doing)

    def _check_flattened(self, doing: str, held: slice) -> None:
        size = math.prod(self.local_shape)
        if held.step not in (None, 1) or held.start is None or held.stop is None:
            raise CheckpointingException(f"{doing}: flattened_range is {held}, expected a start, a stop and no step")
        if not 0 <= held.start <= held.stop <= size:
            raise CheckpointingException(
                f"{doing}: flattened_range is {held}, expected 0 <= start <= stop <= {size}, the number of elements of "
                f"local_shape {self.local_shape}"
            )
        if self.axis_fragmentations is None:
            raise CheckpointingException(
                f"{doing}: it is flattened but axis_fragmentations is None, expected a regular grid; describe the "
                "boxes of the range as tensors of their own"
            )

    def _check_grid(self, doing: str) -> None:
        assert self.axis_fragmentations is not None
        if len(self.axis_fragmentations) != len(self.global_shape):
            raise CheckpointingException(
                f"{doing}: axis_fragmentations {self.axis_fragmentations} must have one number for each axis of "
                f"global_shape {self.global_shape}"
            )
        for axis in range(self.prepend_axis_num, len(self.global_shape)):
            at, size = self.global_offset[axis], self.local_shape[axis - self.prepend_axis_num]
            if size and at % size:
                raise CheckpointingException(
                    f"{doing}: in axis {axis} the offset {at} is no multiple of the local size {size}, so it lies on "
                    "no regular grid; give axis_fragmentations=None for an uneven one"
                )


@dataclass
class ShardedObject(ShardedBase):
    """One element of an array of arbitrary objects; elements are atomic and the array cannot be resharded.

    >>> ShardedObject("rng", {"seed": 1}, (4,), (2,)).unique_key
    'rng/shard_2_4'
    """

    key: str
    """Name of the array in the checkpoint."""
    data: Any = field(repr=False)
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    """Position of this element. Invariant: as many numbers as ``global_shape``."""
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.global_shape = tuple(self.global_shape)
        self.global_offset = tuple(self.global_offset)
        self.validate_metadata_integrity()

    @property
    def unique_key(self) -> str:
        """Name of this element in the checkpoint."""
        offset, shape = (".".join(map(str, numbers)) for numbers in (self.global_offset, self.global_shape))
        return f"{self.key}{_OBJECT_INFIX}{offset}_{shape}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """The description that belongs to a name. Old names lack the last size of the shape, which becomes -1."""
        key, infix, numbers = unique_key.rpartition(_OBJECT_INFIX)
        try:
            offset, shape = (tuple(map(int, part.split("."))) for part in numbers.split("_"))
        except ValueError:
            infix = ""
        if not infix:
            raise CheckpointMismatchError(
                f"reading object name {unique_key!r}: expected KEY{_OBJECT_INFIX}OFFSET_SHAPE, such as "
                "'rng/shard_0.1_2.2'"
            )
        if len(shape) + 1 == len(offset):
            shape += (-1,)
        return cls(key, None, shape, offset, replica_id)

    def without_data(self) -> ShardedObject:
        return replace(self, data=None)

    def validate_metadata_integrity(self) -> None:
        if len(self.global_shape) != len(self.global_offset):
            raise CheckpointingException(
                f"describing object {self.key!r}: global_shape {self.global_shape} and global_offset "
                f"{self.global_offset} must have as many axes"
            )

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"


@dataclass
class LocalNonpersistentObject:
    """A value that is ignored on save; on load it stands in the result as it is here."""

    obj: Any

    def unwrap(self) -> Any:
        """The wrapped value."""
        return self.obj


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A tensor whose sharded form is built at save or load time, so that optimizer state can be built alike."""

    key: str
    data: torch.Tensor | None = field(repr=False)
    build_fn: FactoryBuildFn
    """``(key, data, replica_id, flattened_range) -> nest of sharded leaves``; depends on its arguments only."""
    merge_fn: FactoryMergeFn
    """Inverse of ``build_fn``: the loaded nest, in the same structure, to one tensor."""
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        """The nest of sharded leaves that stands for this tensor."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def without_data(self) -> ShardedTensorFactory:
        return replace(self, data=None)

    def validate_metadata_integrity(self) -> None:
        if not callable(self.build_fn) or not callable(self.merge_fn):
            raise CheckpointingException(f"describing factory {self.key!r}: build_fn and merge_fn must be functions")


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace every factory in the nest by what it builds, in place."""
    places = sharded_state_dict.items() if isinstance(sharded_state_dict, dict) else enumerate(sharded_state_dict)
    for place, leaf in list(places):
        if isinstance(leaf, ShardedTensorFactory):
            sharded_state_dict[place] = leaf.build()
        elif isinstance(leaf, dict | list):
            apply_factories(leaf)  # type: ignore[arg-type]


def apply_factory_merges(loaded: Any, factories: Any, key: tuple[Any, ...] = ()) -> Any:
    """Undo the factories: wherever ``factories`` has one, its merge of what ``loaded`` has there; in place."""
    if isinstance(factories, ShardedTensorFactory):
        return factories.merge_fn(loaded)
    if isinstance(loaded, dict) and isinstance(factories, dict):
        for name, inner in factories.items():
            if name not in loaded:
                raise ValueError(
                    f"Different dict keys encountered in `apply_factory_merges` at {key}: {name!r} was built by a "
                    f"factory but not loaded, found {list(loaded)}"
                )
            loaded[name] = apply_factory_merges(loaded[name], inner, (*key, name))
        return loaded
    if isinstance(loaded, list) and isinstance(factories, list):
        if len(loaded) != len(factories):
            raise ValueError(f"Cannot merge two lists with different lengths {len(loaded)}, {len(factories)} at {key}")
        for index, inner in enumerate(factories):
            loaded[index] = apply_factory_merges(loaded[index], inner, (*key, index))
        return loaded
    if isinstance(loaded, list) and isinstance(factories, dict):
        for index, inner in factories.items():
            if not isinstance(index, int):
                raise ValueError(f"Invalid dict key {index} non-integer type encountered at {key}")
            if not 0 <= index < len(loaded):
                raise ValueError(f"Dict key {index} out of bound for list of length {len(loaded)} at {key}")
            loaded[index] = apply_factory_merges(loaded[index], inner, (*key, index))
        return loaded
    raise ValueError(
        f"Duplicate non-dict and non-list values encountered at {key}: {type(loaded).__name__} and "
        f"{type(factories).__name__}"
    )


def check_has_values(tensor: torch.Tensor, key: str) -> None:
    """Raise `CheckpointMismatchError` for a tensor that has no elements in memory, or not one after another."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested):
        stop = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.is_contiguous() and stop <= tensor.untyped_storage().nbytes():
            return  # as nearly all are
    if (found := why_without_memory(tensor)) is not None:
        raise CheckpointMismatchError(
            f"looking at tensor {key!r}: it is {found}, expected a dense tensor with memory; give it a device with "
            "to_empty(), make it dense with to_dense(), or give the tensors that it is made of"
        )
