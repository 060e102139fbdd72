"""From every layout of a list to every other, bit by bit: cuts of all kinds, replicas, pipelines, flattened slices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from remesh import dist_checkpointing
from remesh.dist_checkpointing import ShardedTensor
from remesh.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from remesh.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from remesh.testbed.pool import RankPool

SHAPE = (4, 8, 6)
"""Layers, rows, columns: one global tensor that every layout cuts in its own way."""
WHOLE = torch.arange(4 * 8 * 6, dtype=torch.int32).reshape(SHAPE).view(torch.float32)
"""Every value another bit pattern, among them denormal ones."""
NUM_RANKS = 4

Layout = Callable[[int], list[ShardedTensor]]


def piece(start: tuple[int, ...], shape: tuple[int, ...], replica: int = 0) -> ShardedTensor:
    """A box of the tensor, wherever it lies."""
    box = tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))
    return ShardedTensor("w", WHOLE[box].clone(), WHOLE.dtype, shape, SHAPE, start, None, replica)


def cut(rank: int, *cuts: tuple[int, int], num_copies: int = 1) -> list[ShardedTensor]:
    """Part of a grid with ``(dim, parts)``; ranks fill it row-major, and copies follow each other."""
    at, replica = rank // num_copies, rank % num_copies
    start, shape = [0, 0, 0], list(SHAPE)
    for dim, parts in reversed(cuts):
        at, index = divmod(at, parts)
        shape[dim] //= parts
        start[dim] = index * shape[dim]
    return [piece(tuple(start), tuple(shape), replica)]


def bands(dim: int, *stops: int) -> Layout:
    """Uneven bands of one dim, one for each rank; empty ones too."""

    def of(rank: int) -> list[ShardedTensor]:
        start, stop = [0, *stops][rank], [*stops, SHAPE[dim]][rank]
        shape = tuple(stop - start if at == dim else size for at, size in enumerate(SHAPE))
        return [piece(tuple(start if at == dim else 0 for at in range(3)), shape)] if start < stop else []

    return of


def layers(rank: int) -> list[ShardedTensor]:
    """A pipeline: each rank has one layer, as a tensor of two dims with a prepended axis."""
    data = WHOLE[rank].clone()
    return [ShardedTensor.from_rank_offsets("w", data, (0, rank, NUM_RANKS), prepend_axis_num=1)]


def interleaved(rank: int) -> list[ShardedTensor]:
    """A pipeline with several stages on a rank: two rows of each layer, as shards of their own."""
    return [piece((layer, 2 * rank, 0), (1, 2, 6)) for layer in range(4)]


def flat(parts: int, *stops: int) -> Layout:
    """An optimizer that shards flat: bands of columns, each cut in runs among the ranks that share it."""

    def of(rank: int) -> list[ShardedTensor]:
        cell, at = divmod(rank, NUM_RANKS // parts)
        width = 6 // parts
        values = WHOLE[:, :, cell * width : (cell + 1) * width].reshape(-1)
        held = slice([0, *stops][at], [*stops, values.numel()][at])
        offsets = (2, cell, parts)
        data = values[held].clone()
        return [ShardedTensor.from_rank_offsets_flat("w", data, (4, 8, width), offsets, flattened_range=held)]

    return of


LAYOUTS: dict[str, Layout] = {
    "replicated": lambda rank: [piece((0, 0, 0), SHAPE, rank)],
    "rows": lambda rank: cut(rank, (1, 4)),
    "layers": lambda rank: cut(rank, (0, 4)),
    "columns in two, two copies": lambda rank: cut(rank, (2, 2), num_copies=2),
    "rows in two, two copies": lambda rank: cut(rank, (1, 2), num_copies=2),
    "rows by columns": lambda rank: cut(rank, (1, 2), (2, 2)),
    "layers by columns": lambda rank: cut(rank, (0, 2), (2, 2)),
    "uneven rows": bands(1, 3, 4, 7),
    "uneven columns, one rank without": bands(2, 1, 1, 5),
    "pipeline": layers,
    "interleaved pipeline": interleaved,
    "flat": flat(1, 40, 41, 150),
    "flat by columns": flat(2, 13),
    "one rank has all": lambda rank: [piece((0, 0, 0), SHAPE)] if rank == 0 else [],
}


def empty(shards: list[ShardedTensor]) -> list[ShardedTensor]:
    for shard in shards:
        assert shard.data is not None
        shard.data = torch.full_like(shard.data, float("nan"))
    return shards


def from_all_to_all(root: Path, fully_parallel: bool, every: int) -> int:
    rank = dist.get_rank()
    save: Any = TorchDistSaveShardedStrategy()
    load: Any = TorchDistLoadShardedStrategy(cache_metadata=True)
    if fully_parallel:
        save, load = FullyParallelSaveStrategyWrapper(save), FullyParallelLoadStrategyWrapper(load)
    num_equal = 0
    for number, layout in enumerate(LAYOUTS.values()):
        directory = root / str(number)
        if rank == 0:
            directory.mkdir()
        dist.barrier()
        dist_checkpointing.save({"w": layout(rank)}, directory, save)
        for at, (name, other) in enumerate(LAYOUTS.items()):
            if (at + number) % every:
                continue
            if fully_parallel and "copies" not in name and name != "replicated":
                continue  # nothing to share: the plain load is tested
            wanted = other(rank)
            request: dict[str, Any] = {"w": empty(other(rank))}
            loaded: Any = dist_checkpointing.load(request, directory, load)
            for found, expected in zip(loaded.get("w", []), wanted, strict=True):
                assert expected.data is not None
                assert torch.equal(found.view(torch.int32), expected.data.view(torch.int32)), (number, name)
            num_equal += 1
    return num_equal


@pytest.mark.long
def test_what_is_saved_in_one_layout_is_loaded_in_any_other(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(from_all_to_all, NUM_RANKS, (tmp_path, False, 1)) == [len(LAYOUTS) ** 2] * NUM_RANKS


def test_what_is_saved_in_one_layout_is_loaded_in_some_others(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(from_all_to_all, NUM_RANKS, (tmp_path, False, 4))[0] > 3 * len(LAYOUTS)


@pytest.mark.slow  # test_checkpoint_random has a sample of it
def test_a_fully_parallel_save_and_load_is_bit_equal_too(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(from_all_to_all, NUM_RANKS, (tmp_path, True, 1)) == [len(LAYOUTS) * 3] * NUM_RANKS
