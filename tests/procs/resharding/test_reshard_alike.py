"""States as models have them, many tensors of few kinds: each tensor gets its own values, whatever it is like."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from remesh.layout.from_torch import Piece, piece_of
from remesh.resharding import Missing, Resharder, reshard
from remesh.testbed.pool import RankPool

NUM_RANKS = 4
DTYPES = [
    *[("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
    *[("bool", "bool"), ("complex128", "complex128"), ("float8_e4m3fn", "float8_e4m3fn"), ("int64", "int64")],
]
FORMS = ("plain", "transposed", "part of a buffer")
_BEFORE = 2
"""Elements of a buffer before its part."""


@dataclass(frozen=True)
class Side:
    """Where tensors are, or should be."""

    mesh: DeviceMesh
    placements: list[Placement]
    dtype: torch.dtype

    @classmethod
    def draw(cls, rng: random.Random, some: list[Placement], dtype: str) -> Side:
        members = rng.sample(range(NUM_RANKS), rng.choice([1, 2, 3, 4, 4]))
        shape = (2, 2) if len(members) == 4 and rng.random() < 0.5 else (len(members),)
        mesh = DeviceMesh("cpu", torch.tensor(members).reshape(shape), _init_backend=False)
        return cls(mesh, [rng.choice(some) for _ in shape], getattr(torch, dtype))

    @property
    def num_addends(self) -> int:
        sums = [size for size, each in zip(self.mesh.shape, self.placements, strict=True) if each.is_partial()]
        return torch.Size(sums).numel()

    def place(self, whole: torch.Tensor) -> DTensor:
        """This rank's part of the tensor; of partial sums all of it on every rank."""
        plain = [Replicate() if each.is_partial() else each for each in self.placements]
        local = distribute_tensor(whole.to(self.dtype), self.mesh, plain, src_data_rank=None).to_local().clone()
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )


def keep(tensor: DTensor, form: str) -> tuple[DTensor | Piece, torch.Tensor]:
    """The same in memory of this form, and where its local values are seen."""
    local = tensor.to_local()
    if form == "transposed" and local.ndim > 1:
        local = local.transpose(0, 1).contiguous().transpose(0, 1)
    if form != "part of a buffer":
        again = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        return again, local
    buffer = torch.zeros(_BEFORE + local.numel() + 1, dtype=local.dtype)
    seen = buffer[_BEFORE : _BEFORE + local.numel()].view(local.shape)
    seen.copy_(local)
    piece = piece_of(tensor)
    shards = tuple(replace(shard, offset=_BEFORE + shard.offset) for shard in piece.shards)
    return Piece(buffer, piece.global_shape, shards, piece.partial), seen


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def draw_kind(rng: random.Random) -> tuple[tuple[int, ...], Side, Side]:
    """A shape, where tensors of it are, and where they are wanted."""
    shape = tuple(rng.choice([0, 1, 2, 3, 5, 8, 17]) for _ in range(rng.randint(0, 3)))
    held, wanted = rng.choice(DTYPES)
    some: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    sums: list[Placement] = [Partial("sum")] if held == "int64" else []
    return shape, Side.draw(rng, some + sums, held), Side.draw(rng, some, wanted)


def draw_kinds(rng: random.Random) -> list[tuple[tuple[int, ...], Side, Side]]:
    """Some kinds, and some that differ from one of those in a single thing."""
    kinds = [draw_kind(rng) for _ in range(rng.randint(1, 4))]
    for shape, held, wanted in rng.sample(kinds, rng.randint(0, len(kinds))):
        other = draw_kind(rng)
        nearly = [(shape, held, replace(wanted, dtype=held.dtype)), (shape, replace(held, dtype=wanted.dtype), wanted)]
        if len(other[0]) == len(shape):
            nearly.append((other[0], held, wanted))
        kinds.append(rng.choice(nearly))
    return kinds


def move_many_at_random(seed: int) -> None:
    """All ranks draw the same state."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kinds = draw_kinds(rng)
    give: dict[str, Any] = {}
    take: dict[str, Any] = {}
    seen, rights = {}, {}
    for number in range(rng.randint(1, 24)):
        shape, held, wanted = rng.choice(kinds)
        name = f"{rng.randrange(1 << 16):04x}.{number}"
        whole, before = (torch.randint(0, 100, shape, generator=generator) for _ in range(2))
        is_given, *forms = rng.random() < 0.95, rng.choice(FORMS), rng.choice(FORMS)
        if is_given and held.mesh.get_coordinate() is not None:
            give[name], _ = keep(held.place(whole), forms[0])
        if wanted.mesh.get_coordinate() is not None:
            take[name], seen[name] = keep(wanted.place(before), forms[1])
            summed = whole.to(held.dtype) * held.num_addends if held.num_addends > 1 else whole.to(held.dtype)
            rights[name] = wanted.place(summed if is_given else before).to_local()
    num_hosts = rng.choice([1, 2, 4])
    options: dict[str, Any] = {
        "chunk_bytes": rng.choice([64, 200, 1 << 22]),
        "missing": Missing.LEAVE,
        "host_of": {rank: f"h{rank % num_hosts}" for rank in range(NUM_RANKS)},
    }
    kept = Resharder(**options)
    for move in (partial(reshard, **options), kept.reshard, kept.reshard):
        move(give, take)
        for name, right in rights.items():
            assert bits_of(seen[name]) == bits_of(right), (seed, name)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(12, 60, 12))])
def test_random_states_of_many_alike_tensors_arrive(ranks: RankPool, first: int) -> None:
    ranks.run(move_some_states, NUM_RANKS, (first,))


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1504, 12))
def test_many_random_states_of_alike_tensors_arrive(ranks: RankPool, first: int) -> None:
    ranks.run(move_some_states, NUM_RANKS, (first,))


def move_some_states(first: int) -> None:
    for seed in range(first, first + 12):
        move_many_at_random(seed)
