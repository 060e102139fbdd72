"""Ranks write the cells of one grid, and read them under another."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from remesh import dist_checkpointing
from remesh.dist_checkpointing import ShardedObject, ShardedTensor
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from remesh.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy

_ROWS, _COLUMNS = 12, 8


def _state(axis: int, scale: float) -> dict[str, object]:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(_ROWS * _COLUMNS, dtype=torch.float32).reshape(_ROWS, _COLUMNS) * scale
    part = whole.chunk(size, axis)[rank].contiguous()
    return {
        "w": ShardedTensor.from_rank_offsets("w", part, (axis, rank, size)),
        "copy": ShardedTensor.from_rank_offsets("copy", whole[0].clone(), replica_id=rank),
        "o": ShardedObject("o", {"axis": axis}, (1,), (0,), replica_id=rank),
    }


def _save(directory: Path, wraps: bool) -> None:
    strategy = ZarrSaveShardedStrategy()
    dist_checkpointing.save(_state(0, 1), directory, FullyParallelSaveStrategyWrapper(strategy) if wraps else strategy)


def _load(directory: Path, wraps: bool) -> bool:
    strategy = ZarrLoadShardedStrategy()
    wanted, expected = _state(1, 0), _state(1, 1)
    loaded = dist_checkpointing.load(
        wanted, directory, FullyParallelLoadStrategyWrapper(strategy) if wraps else strategy
    )
    same = [torch.equal(loaded[name], expected[name].data) for name in ("w", "copy")]
    return all(same) and loaded["o"] == {"axis": 0}


def _save_uneven(directory: Path) -> str:
    start, stop = ((0, 3), (3, 5))[dist.get_rank()]
    uneven = ShardedTensor("w", torch.zeros(stop - start), torch.float32, (stop - start,), (5,), (start,), None)
    try:
        dist_checkpointing.save({"w": uneven}, directory, ("zarr", 1))
    except CheckpointingException as raised:
        return str(raised)
    return "saved"


def test_cells_of_four_ranks_are_read_by_two_in_another_direction(ranks, tmp_path):
    for wraps in (False, True):
        directory = tmp_path / f"wrapped-{wraps}"
        directory.mkdir()
        ranks.run(_save, world_size=4, args=(directory, wraps))
        found = json.loads((directory / "w/.zarray").read_text())
        assert (found["shape"], found["chunks"]) == ([12, 8], [3, 8])
        assert ranks.run(_load, world_size=2, args=(directory, wraps)) == [True, True]


def test_shards_that_make_no_grid_are_the_same_error_on_all_ranks(ranks, tmp_path):
    told = ranks.run(_save_uneven, world_size=2, args=(tmp_path,))
    assert len(set(told)) == 1 and "save it as torch_dist" in told[0]
    assert not (tmp_path / "metadata.json").exists()
