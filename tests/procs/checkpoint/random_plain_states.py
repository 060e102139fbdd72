"""Random plain states as programs of others have them: what is saved by some ranks, and what others ask for.

A *catalogue* is drawn by a seed: named tensors with their whole values, of which some are equal (tied), and others.
A *side* is drawn for a number of ranks: how its ranks hold each tensor. It may be whole on every rank, strided, a view
of a larger buffer, tied to another name; a DTensor on some of the ranks; or a `Piece` of uneven boxes in a flat buffer,
side by side with those of other names, which some ranks do not have at all. The oracle is the whole value and the box.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from remesh.layout import Box, Shard as HeldBox
from remesh.layout.from_torch import Piece

_DTYPES = [
    *(torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32),
    *(torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn),
]
_SIZES = (0, 1, 1, 2, 3, 5, 8, 13)
_Together = list[tuple[str, dict[int, list[Box]]]]
"""Names, and which of their boxes each rank has."""
_NOBODYS = 3.0
"""What is in a buffer between the boxes of all names."""


@dataclass(frozen=True)
class Catalogue:
    """What is in a state, whoever holds it."""

    wholes: dict[str, torch.Tensor]
    tied: dict[str, str]
    """Name -> an earlier name with equal values."""
    common: dict[str, Any]

    @classmethod
    def draw(cls, seed: int, num_tensors: int = 14) -> Catalogue:
        chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        wholes: dict[str, torch.Tensor] = {}
        tied: dict[str, str] = {}
        for number in range(num_tensors):
            name = f"{chance.choice(['model', 'ema', 'optim'])}.{chance.choice('abc')}{number}"
            if wholes and chance.random() < 0.15:
                tied[name] = chance.choice(sorted(wholes))
                wholes[name] = wholes[tied[name]]
                continue
            shape = tuple(chance.choice(_SIZES) for _ in range(chance.choice([0, 1, 1, 2, 2, 3])))
            wholes[name] = torch.randint(0, 90, shape, generator=generator).to(chance.choice(_DTYPES))
        common = {"step": seed, "plain": {"rates": [0.1, (1, 2)], "none": None, "text": "\u00e4", 3: {"deep": b"x"}}}
        return cls(wholes, tied, common)


@dataclass
class Side:
    """What one rank holds, and where its values are seen."""

    tensors: dict[str, torch.Tensor | Piece] = field(default_factory=dict)
    seen: dict[str, list[tuple[torch.Tensor, Box]]] = field(default_factory=dict)
    """Views of memory, and which box of the tensor each of them shows."""
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Flat buffers, and which of their elements belong to nobody."""

    def fill(self, catalogue: Catalogue) -> None:
        """Put the values in."""
        for name, views in self.seen.items():
            for view, box in views:
                view.copy_(catalogue.wholes[name][box.slices()])

    def check(self, catalogue: Catalogue, about: object) -> int:
        """Raise AssertionError unless all values are there, and nothing is changed between them; how many views."""
        for name, views in self.seen.items():
            for view, box in views:
                right = catalogue.wholes[name][box.slices()].to(view.dtype)
                assert bits_of(view) == bits_of(right), (about, name, str(box))
        for buffer, free in self.buffers:
            as_before = _opaque(torch.full((len(buffer),), _NOBODYS).to(buffer.dtype))
            assert torch.equal(_opaque(buffer)[free], as_before[free]), (about, "written between boxes")
        return sum(map(len, self.seen.values()))


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def _opaque(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def draw_side(
    catalogue: Catalogue, seed: int, rank: int, num_ranks: int | Sequence[int], *, pieces: bool = True
) -> Side:
    """What ``rank`` holds of so many, or of these; all ranks draw the same. Its memory holds no values yet."""
    chance, side = random.Random(seed), Side()
    ranks = range(num_ranks) if isinstance(num_ranks, int) else num_ranks
    buffers: _Together = []
    in_buffers: set[str] = set()
    for name, whole in catalogue.wholes.items():
        first = catalogue.tied.get(name)
        form = chance.choice(["plain", "strided", "view", "dtensor", "dtensor", "piece" if pieces else "dtensor"])
        if chance.random() < 0.7 and first is not None and first not in in_buffers:
            if first in side.tensors:  # else this rank has neither
                side.tensors[name], side.seen[name] = side.tensors[first], side.seen[first]
        elif form == "dtensor":
            _add_dtensor(side, name, whole, chance, ranks)
        elif form == "piece" and whole.numel():
            boxes = _cut(chance, Box.of_shape(tuple(whole.shape)), chance.randint(1, 2 * len(ranks)))
            held: dict[int, list[Box]] = {}
            for box in boxes:
                for holder in chance.sample(ranks, chance.choice([1, 1, min(2, len(ranks))])):
                    held.setdefault(holder, []).append(box)
            buffers.append((name, held))
            in_buffers.add(name)
        else:
            memory = _memory_of(whole, form)
            side.tensors[name], side.seen[name] = memory, [(memory, Box.of_shape(tuple(whole.shape)))]
    for together in _by_dtype(buffers, catalogue):
        _add_pieces(side, together, catalogue, rank, is_contiguous=chance.random() < 0.6, gap=chance.randrange(3))
    return side


def _memory_of(whole: torch.Tensor, form: str) -> torch.Tensor:
    if form == "strided" and whole.ndim > 1:
        return torch.zeros_like(whole.transpose(0, 1).contiguous()).transpose(0, 1)
    if form == "view" and whole.ndim:
        return torch.zeros((2, *whole.shape), dtype=whole.dtype).transpose(0, 1)[:, 1]
    return torch.zeros_like(whole)


def _add_dtensor(side: Side, name: str, whole: torch.Tensor, chance: random.Random, ranks: Sequence[int]) -> None:
    members = chance.sample(ranks, chance.randint(1, len(ranks)))
    shape = (2, len(members) // 2) if len(members) % 2 == 0 and chance.random() < 0.5 else (len(members),)
    mesh = DeviceMesh("cpu", torch.tensor(members).reshape(shape), _init_backend=False)
    placements = [chance.choice([Replicate(), *map(Shard, range(whole.ndim))]) for _ in shape]
    may_be_left_out, is_transposed = chance.random() < 0.5, chance.random() < 0.3
    if mesh.get_coordinate() is None and may_be_left_out:
        return
    # Where each element of the tensor is, in the whole one.
    numbers = torch.arange(whole.numel()).reshape(whole.shape)
    local_numbers = distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local()
    local = torch.zeros(local_numbers.shape, dtype=whole.dtype)
    if local.ndim > 1 and is_transposed:
        local = local.transpose(0, 1).contiguous().transpose(0, 1)
    side.tensors[name] = (
        DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
        if local.numel()
        else distribute_tensor(torch.zeros_like(whole), mesh, placements, src_data_rank=None)
    )
    side.seen[name] = []
    if local.numel():
        first, last = (int(local_numbers.reshape(-1)[at]) for at in (0, -1))
        corners = [torch.unravel_index(torch.tensor(at), whole.shape) for at in (first, last)]
        box = Box(tuple(int(x) for x in corners[0]), tuple(int(x) + 1 for x in corners[1]))
        assert box.size == local.numel()
        side.seen[name] = [(local, box)]


def _cut(chance: random.Random, box: Box, num_parts: int) -> list[Box]:
    """Boxes that make up a box, cut anywhere."""
    parts = [box]
    for _ in range(num_parts - 1):
        part = parts.pop(chance.randrange(len(parts)))
        dims = [dim for dim, size in enumerate(part.shape) if size > 1]
        if not dims:
            parts.append(part)
            continue
        dim = chance.choice(dims)
        at = chance.randrange(part.start[dim] + 1, part.stop[dim])
        low, high = list(part.stop), list(part.start)
        low[dim] = high[dim] = at
        parts += [Box(part.start, tuple(low)), Box(tuple(high), part.stop)]
    return parts


def _by_dtype(buffers: _Together, catalogue: Catalogue) -> Iterator[_Together]:
    """Names whose boxes lie in one buffer."""
    for dtype in dict.fromkeys(catalogue.wholes[name].dtype for name, _ in buffers):
        yield [one for one in buffers if catalogue.wholes[one[0]].dtype == dtype]


def _add_pieces(
    side: Side, together: _Together, catalogue: Catalogue, rank: int, *, is_contiguous: bool, gap: int
) -> None:
    """The boxes of this rank one after the other, with a gap before each; a rank without any has no such name."""
    places: list[tuple[str, list[HeldBox]]] = []
    end = 0
    for name, held in together:
        shards = []
        for box in held.get(rank, []):
            shards.append(HeldBox(0, box, end + gap))
            end += gap + box.size
        places.append((name, shards))
    dtype = catalogue.wholes[together[0][0]].dtype
    memory = torch.full((end + 1, 1 if is_contiguous else 2), _NOBODYS).to(dtype)
    buffer = memory[:, 0]
    free = torch.ones(len(buffer), dtype=torch.bool)
    for name, shards in places:
        if not shards:
            continue
        side.tensors[name] = Piece(buffer, tuple(catalogue.wholes[name].shape), tuple(shards))
        side.seen[name] = []
        for shard in shards:
            free[shard.offset : shard.offset + shard.box.size] = False
            strides = [stride * buffer.stride(0) for stride in shard.strides or ()]
            start = shard.offset * buffer.stride(0)
            side.seen[name].append((memory.as_strided(shard.box.shape, strides, start), shard.box))
    side.buffers.append((buffer, free))


def nested(tensors: dict[str, Any]) -> dict[str, Any]:
    """Dicts of dicts, as names with dots say."""
    nest: dict[str, Any] = {}
    for name, tensor in tensors.items():
        group, leaf = name.split(".")
        nest.setdefault(group, {})[leaf] = tensor
    return nest
