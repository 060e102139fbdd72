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


def _save_slices(directory: Path) -> None:
    """The example of 2 x 6 elements: two columns of cells, each flattened and cut in three."""
    rank = dist.get_rank()
    cell, part = rank % 2, rank // 2
    held = slice(2 * part, 2 * part + 2)
    values = torch.arange(12.0).reshape(2, 6).chunk(2, 1)[cell].reshape(-1)[held].clone()
    flat = ShardedTensor.from_rank_offsets_flat("w", values, (2, 3), (1, cell, 2), flattened_range=held)
    dist_checkpointing.save({"w": flat}, directory, ("zarr", 1))


def _load_column(directory: Path) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    held = slice(0, 12 // size)
    flat = ShardedTensor.from_rank_offsets_flat(
        "w", torch.zeros(12 // size), (2, 6 // size), (1, rank, size), flattened_range=held
    )
    return dist_checkpointing.load({"w": flat}, directory)["w"].tolist()


def test_flattened_slices_of_six_ranks_become_cells_and_columns(ranks, tmp_path):
    ranks.run(_save_slices, world_size=6, args=(tmp_path,))
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == [".zarray", "0.0", "0.1"]
    assert ranks.run(_load_column, world_size=3, args=(tmp_path,)) == [
        [0.0, 1.0, 6.0, 7.0], [2.0, 3.0, 8.0, 9.0], [4.0, 5.0, 10.0, 11.0]
    ]  # fmt: skip
