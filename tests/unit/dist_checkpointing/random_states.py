"""Random sharded state dicts, and what a load of them must bring: whole tensors of torch, cut by plain indexing.

A *catalogue* is what a checkpoint holds: whole tensors, arrays of objects, common data. A *state* is one way to share a
catalogue among ranks: each tensor cut by a grid, at random lines, or into slices of flattened cells, in memory of any
strides. All follows from seeds, so that ranks and processes that share a seed know the same.
"""

from __future__ import annotations

import io
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from remesh.dist_checkpointing import ShardedObject, ShardedTensor, ShardedTensorFactory

DTYPES = [
    *[torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool],
    *[torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64],
    *[torch.float8_e4m3fn, torch.float8_e5m2],
]
FORMS = ("grid", "uneven", "flattened", "factory")

Random = np.random.Generator
Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor of a catalogue."""

    key: str
    tensor: torch.Tensor
    num_prepended: int
    """Leading axes that no rank's memory has."""
    form: str
    """How it is cut when it is saved. Slices and factories are loaded in their own form, by another cut."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    wholes: list[Whole]
    objects: dict[str, np.ndarray]
    common: dict[str, Any]


@dataclass(slots=True)
class State:
    """Parts of all ranks, by rank, and what a load must put in their places."""

    parts: list[dict[str, Any]]
    expected: list[dict[str, Any]]
    memory: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Pairs of all memory that a destination lies in, and of how it must look after the load."""
    stored_shapes: dict[str, list[int]] = field(default_factory=dict)
    """Of each key that is saved in slices, the grid and the size of its cells."""


def make_catalogue(seed: int, num_tensors: int = 6) -> Catalogue:
    random = np.random.default_rng(seed)
    wholes = [_make_whole(random, f"layer.{number}", FORMS[number % len(FORMS)]) for number in range(num_tensors)]
    objects = {}
    for number in range(2):
        shape = tuple(random.integers(1, 3, size=random.integers(1, 3)).tolist())
        objects[f"extra/{number}"] = array = np.empty(shape, dtype=object)
        for at in np.ndindex(shape):
            array[at] = make_object(random)
    common = {"step": int(random.integers(100)), "nest": [make_object(random) for _ in range(3)]}
    return Catalogue(wholes, objects, common)


def make_object(random: Random) -> Any:
    buffer = io.BytesIO(random.bytes(int(random.integers(20))))
    buffer.seek(int(random.integers(5)))
    number = int(random.integers(1 << 60))
    kinds = [
        None,
        number,
        number / 7,
        str(number),
        random.bytes(9),
        buffer,
        b"",
        pathlib.PurePosixPath("a") / str(number),
    ]
    kinds += [{"deep": [number, (number, None)], number: {}}, make_bits(random, torch.bfloat16, (2, 3)), [], True]
    return kinds[random.integers(len(kinds))]


def make_bits(random: Random, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits, those that are no number too."""
    num = math.prod(shape)
    bits = random.integers(2 if dtype is torch.bool else 256, size=num * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(bits).view(dtype).reshape(shape) if num else torch.empty(shape, dtype=dtype)


def _make_whole(random: Random, key: str, form: str) -> Whole:
    dtype = DTYPES[random.integers(len(DTYPES))]
    num_prepended = int(random.integers(3)) if form in ("grid", "flattened") else 0
    num_dims = int(random.integers(form in ("flattened", "factory"), 4))
    sizes = [1, 2, 3, 4, 6, 12] if form in ("flattened", "factory") else [0, 1, 1, 2, 3, 4, 5, 6, 12]
    shape = [int(random.integers(1, 4)) for _ in range(num_prepended)]
    shape += [int(random.choice(sizes)) for _ in range(num_dims)]
    if form == "factory":
        shape[0] *= 2
    return Whole(key, make_bits(random, dtype, tuple(shape)), num_prepended, form)


def make_state(catalogue: Catalogue, seed: int, num_ranks: int, *, filled: bool) -> State:
    """The catalogue shared among ranks; ``filled`` as it is saved, otherwise as it is asked for."""
    random = np.random.default_rng(seed)
    state = State([{} for _ in range(num_ranks)], [{} for _ in range(num_ranks)])
    for whole in catalogue.wholes:
        form = whole.form if filled or whole.form == "factory" else str(random.choice(_forms_to_load(whole)))
        for number, (made, value) in enumerate(_CUTS[form](whole, random, state, filled)):
            name = f"{whole.key}-{number}"
            _put(random, state, name, made, value)
            if isinstance(made, ShardedTensor) and random.random() < 0.3:
                assert made.data is not None
                _put(random, state, f"{name}-again", replace(made, data=made.data.clone(), replica_id=1), value)
    for key, array in catalogue.objects.items():
        for at in np.ndindex(array.shape):
            made = ShardedObject(key, array[at] if filled else None, array.shape, at)
            _put(random, state, f"{key}-{at}", made, array[at])
    return state


def _forms_to_load(whole: Whole) -> list[str]:
    return ["grid", "uneven", "flattened"] if whole.form == "flattened" else ["grid", "uneven"]


def _put(random: Random, state: State, name: str, made: Any, value: Any) -> None:
    """Give it to a rank."""
    rank = random.integers(len(state.parts))
    state.parts[rank][name], state.expected[rank][name] = made, value


Made = Iterator[tuple[Any, torch.Tensor]]
"""Each part, and the values it stands for."""


def _cut_by_grid(whole: Whole, random: Random, state: State, filled: bool) -> Made:
    fragments = _choose_grid(whole, random)
    for cell, box in _cells(whole.tensor.shape, fragments):
        value = _without(whole, whole.tensor[box])
        offsets = [(axis, *pair) for axis, pair in enumerate(zip(cell, fragments, strict=True))]
        data = _lay(random, value, state, filled)
        yield (
            ShardedTensor.from_rank_offsets(whole.key, data, *offsets, prepend_axis_num=whole.num_prepended),
            value,
        )


def _cut_anywhere(whole: Whole, random: Random, state: State, filled: bool) -> Made:
    for box in _uneven_boxes(whole, random):
        value = _without(whole, whole.tensor[box])
        data = _lay(random, value, state, filled)
        offset = tuple(part.start for part in box)
        place = (tuple(value.shape), tuple(whole.tensor.shape), offset, None)
        yield ShardedTensor(whole.key, data, value.dtype, *place, prepend_axis_num=whole.num_prepended), value


def _cut_flattened(whole: Whole, random: Random, state: State, filled: bool) -> Made:
    fragments = _choose_grid(whole, random)
    for cell, box in _cells(whole.tensor.shape, fragments):
        local = _without(whole, whole.tensor[box])
        flat = local.reshape(-1)
        if filled:
            state.stored_shapes[whole.key] = [*fragments, len(flat)]
        lines = sorted([0, len(flat), *random.integers(len(flat) + 1, size=random.integers(4)).tolist()])
        offsets = [(axis, *pair) for axis, pair in enumerate(zip(cell, fragments, strict=True))]
        for start, stop in itertools.pairwise(lines):
            made = ShardedTensor.from_rank_offsets_flat(
                whole.key,
                _lay(random, flat[start:stop], state, filled),
                tuple(local.shape),
                *offsets,
                flattened_range=slice(start, stop),
                prepend_axis_num=whole.num_prepended,
            )
            yield made, flat[start:stop]


def _cut_for_factories(whole: Whole, random: Random, state: State, filled: bool) -> Made:
    """The whole is two halves one behind the other; each rank's tensor has a part of both."""
    halves = whole.tensor.chunk(2)
    num = int(random.choice(_divisors(len(halves[0]))))
    for rank in range(num):
        value = torch.cat([half.chunk(num)[rank] for half in halves])
        data = _lay(random, value, None, filled)

        def build(key: str, data: Any, replica_id: Any, _held: slice | None, rank: int = rank) -> list[ShardedTensor]:
            make = ShardedTensor.from_rank_offsets
            places = (rank, num + rank)
            parts = zip(data.chunk(2), places, strict=True)
            return [make(key, part, (0, place, 2 * num), replica_id=replica_id) for part, place in parts]

        yield ShardedTensorFactory(whole.key, data, build, torch.cat), value


_CUTS: dict[str, Callable[[Whole, Random, State, bool], Made]] = {
    "grid": _cut_by_grid,
    "uneven": _cut_anywhere,
    "flattened": _cut_flattened,
    "factory": _cut_for_factories,
}


def _without(whole: Whole, part: torch.Tensor) -> torch.Tensor:
    """The part as a rank holds it: without prepended axes."""
    return part.reshape(part.shape[whole.num_prepended :])


def _divisors(size: int) -> list[int]:
    return [number for number in range(1, size + 1) if size % number == 0] or [1]


def _choose_grid(whole: Whole, random: Random) -> list[int]:
    shape = whole.tensor.shape
    own = [int(random.choice(_divisors(size))) for size in shape[whole.num_prepended :]]
    return [*shape[: whole.num_prepended], *own]


def _cells(shape: torch.Size, fragments: list[int]) -> Iterator[tuple[tuple[int, ...], Box]]:
    for cell in itertools.product(*map(range, fragments)):
        steps = [size // parts for size, parts in zip(shape, fragments, strict=True)]
        yield cell, tuple(slice(at * step, (at + 1) * step) for at, step in zip(cell, steps, strict=True))


def _uneven_boxes(whole: Whole, random: Random) -> Iterator[Box]:
    axes = []
    for axis, size in enumerate(whole.tensor.shape):
        lines = range(size + 1)
        if axis >= whole.num_prepended:
            inner = random.integers(1, size, size=random.integers(3)).tolist() if size > 1 else []
            lines = sorted({0, size, *inner}) if size else [0, 0]
        axes.append([slice(start, stop) for start, stop in itertools.pairwise(lines)])
    yield from itertools.product(*axes)


def _lay(random: Random, value: torch.Tensor, state: State | None, filled: bool) -> torch.Tensor:
    """Memory of the value's shape and some strides: with its values, or to be filled and with other bits."""
    around, steps = (int(number) for number in random.integers(1, 4, size=2))
    axes = random.permutation(value.ndim)
    sizes = [value.shape[axis] for axis in axes]
    room = make_bits(random, value.dtype, (*[size * steps for size in sizes], around))
    back = np.argsort(axes).tolist()

    def view(memory: torch.Tensor) -> torch.Tensor:
        part = memory[(*[slice(None, None, steps)] * len(sizes), around - 1)].permute(back)
        if part.numel() == 1:  # whose strides mean nothing
            part = part.as_strided(part.shape, random_strides, part.storage_offset())
        return part

    random_strides = random.integers(9, size=value.ndim).tolist()
    wanted = room.clone()
    view(wanted).copy_(value)
    if filled:
        return view(wanted)
    if state is not None:
        state.memory.append((room, wanted))
    return view(room)


def same(left: Any, right: Any) -> bool:
    """Whether values are of one type and equal, to the bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(_bits(left), _bits(right))
    if isinstance(left, io.BytesIO):
        return (left.getvalue(), left.tell()) == (right.getvalue(), right.tell())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def as_stored(whole: Whole, stored_shapes: dict[str, list[int]]) -> torch.Tensor:
    """What others read under the key: the tensor, or its cells one behind the other where it was saved in slices."""
    if whole.key not in stored_shapes:
        return whole.tensor
    *fragments, _ = shape = stored_shapes[whole.key]
    cells = [whole.tensor[box].reshape(-1) for _, box in _cells(whole.tensor.shape, fragments)]
    return torch.stack(cells).reshape(shape)
