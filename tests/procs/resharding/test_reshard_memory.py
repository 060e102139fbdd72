"""A rank without memory for a reshard: all hear of it before anything moves, or at least at once; old shards stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import remesh
from remesh.foundation.errors import PeerError, PlanError
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece
from remesh.resharding.running.carry import Staging
from remesh.testbed.pool import RankPool

SIDE = 8
ERRORS = {
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "host": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 20971520 bytes."),
}


def part(value: float, dim: int) -> Piece:
    """This rank's rows, or columns, of a square."""
    rank, size = dist.get_rank(), dist.get_world_size()
    start, stop = [0, 0], [SIDE, SIDE]
    start[dim], stop[dim] = rank * SIDE // size, (rank + 1) * SIDE // size
    box = Box(tuple(start), tuple(stop))
    return Piece(torch.full(box.shape, value), (SIDE, SIDE), (Shard(0, box),))


def move_without_staging(where: str) -> str:
    """Rank 1 has no memory for staging, for a while."""
    give, take = part(3.0, 0), part(0.0, 1)
    real = torch.empty

    def refuse(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8 and isinstance(options.get("device"), torch.device):
            raise ERRORS[where]
        return real(*size, **options)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(torch, "empty", refuse)
        with pytest.raises(PlanError) as raised:
            remesh.reshard({"w": give}, {"w": take})
    assert give.tensor.eq(3.0).all() and take.tensor.eq(0.0).all()
    remesh.reshard({"w": give}, {"w": take})
    assert take.tensor.eq(3.0).all()
    return str(raised.value)


@pytest.mark.parametrize("where", ERRORS)
def test_memory_that_is_not_to_be_had_is_told_on_all_ranks_before_anything_moves(ranks: RankPool, where: str) -> None:
    told = ranks.run(move_without_staging, 2, (where,))
    assert told[0] == told[1]
    assert "rank 1 needs" in told[0] and "nothing has moved" in told[0] and "max_staging_bytes" in told[0]


def refit_without_a_second_buffer(where: str) -> str:
    """Rank 1 has no memory for it when its `Refit` is made."""
    trains = dist.get_rank() == 0

    def refuse(_: torch.UntypedStorage) -> torch.UntypedStorage:
        raise ERRORS[where]

    with pytest.MonkeyPatch.context() as patch:
        if not trains:
            patch.setattr(torch.UntypedStorage, "clone", refuse)
        refit = remesh.Refit({} if trains else {"w": part(0.0, 1)})
    with pytest.raises(PlanError) as raised:
        refit.push({"w": part(3.0, 0)} if trains else None, 1 if trains else None)
    return str(raised.value)


@pytest.mark.parametrize("where", ERRORS)
def test_a_generator_without_memory_for_a_second_buffer_is_told_on_all_ranks(ranks: RankPool, where: str) -> None:
    told = ranks.run(refit_without_a_second_buffer, 2, (where,))
    assert told[0] == told[1]
    assert "second buffer" in told[0] and "in_place=True" in told[0]


def lose_memory_on_the_way(where: str) -> str:
    """Somebody else takes the memory between the agreement and the run."""

    def refuse(self: Staging, nbytes: int, device: torch.device) -> torch.Tensor:
        raise ERRORS[where]

    give, take = part(3.0, 0), part(0.0, 1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Staging, "_allocate", refuse)
        with pytest.raises(RuntimeError) as raised:
            remesh.reshard({"w": give}, {"w": take})
    assert give.tensor.eq(3.0).all(), "what is given stands"
    return "peer" if isinstance(raised.value, PeerError) else str(raised.value)


@pytest.mark.parametrize("where", ERRORS)
def test_a_rank_whose_memory_goes_on_the_way_says_so_and_the_others_lose_a_peer(ranks: RankPool, where: str) -> None:
    assert ranks.run(lose_memory_on_the_way, 2, (where,)) == ["peer", str(ERRORS[where])]
