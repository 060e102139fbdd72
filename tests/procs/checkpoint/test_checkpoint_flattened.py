"""Slices of flattened parameters: saved by an optimizer that flattens, loaded under any other split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from remesh import dist_checkpointing
from remesh.checkpoint.run.reader import open_checkpoint
from remesh.dist_checkpointing import ShardedTensor
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.testbed.pool import RankPool

GLOBAL = torch.arange(12).reshape(2, 6)

# Of each (tp, dp) the rows of the guide: local slices by rank = tp_size * dp + tp.
OLD = [[0, 1], [3, 4], [2, 6], [5, 9], [7, 8], [10, 11]]
NEW = [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]


def flat_slice(tp_size: int, dp_size: int, *, filled: bool) -> ShardedTensor:
    """This rank's slice of the 2 x 6 tensor, of which TP splits dim 1 and DP the flattened part."""
    rank = dist.get_rank()
    tp, dp = rank % tp_size, rank // tp_size
    cell = GLOBAL.chunk(tp_size, dim=1)[tp].reshape(-1)
    length = len(cell) // dp_size
    held = slice(length * dp, length * (dp + 1))
    data = cell[held].clone() if filled else torch.full((length,), -1)
    return ShardedTensor.from_rank_offsets_flat("w", data, (2, 6 // tp_size), (1, tp, tp_size), flattened_range=held)


def save_flat(directory: Path, tp_size: int, dp_size: int) -> list[int]:
    piece = flat_slice(tp_size, dp_size, filled=True)
    assert piece.data is not None
    dist_checkpointing.save({"w": piece}, directory)
    return piece.data.tolist()  # type: ignore[no-any-return]


def load_flat(directory: Path, tp_size: int, dp_size: int) -> list[int]:
    piece = flat_slice(tp_size, dp_size, filled=False)
    loaded = dist_checkpointing.load({"w": piece}, directory)["w"]  # type: ignore[call-overload]
    assert loaded.data_ptr() == piece.data.data_ptr()  # type: ignore[union-attr]
    assert torch.equal(loaded, flat_slice(tp_size, dp_size, filled=True).data)  # type: ignore[arg-type]
    return loaded.tolist()  # type: ignore[no-any-return]


def test_the_example_of_the_guide_to_the_element(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(save_flat, 6, (tmp_path, 2, 3)) == OLD
    stored = open_checkpoint(tmp_path).manifest
    assert stored.tensors["w"].global_shape == (1, 2, 6)
    assert stored.unflattened_shapes == {"w": (2, 6)}
    chunks = {chunk.extent.file: (chunk.box.start, chunk.box.shape) for chunk in stored.tensors["w"].chunks}
    assert chunks["__2_0.distcp"] == ((0, 0, 2), (1, 1, 2))
    assert chunks["__5_0.distcp"] == ((0, 1, 4), (1, 1, 2))
    assert ranks.run(load_flat, 6, (tmp_path, 6, 1)) == NEW


def test_every_split_loads_into_every_other(ranks: RankPool, tmp_path: Path) -> None:
    splits = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 3), (3, 2), (1, 6), (6, 1), (2, 2)]
    for saved in splits:
        directory = tmp_path / f"{saved[0]}x{saved[1]}"
        directory.mkdir()
        ranks.run(save_flat, saved[0] * saved[1], (directory, *saved))
    ranks.run(load_flat_all, 6, (tmp_path, splits, (6, 1)))
    for wanted in ((2, 3), (1, 1), (1, 3), (3, 1), (2, 2)):
        ranks.run(load_flat_all, wanted[0] * wanted[1], (tmp_path, splits, wanted))


def load_flat_all(root: Path, splits: list[tuple[int, int]], wanted: tuple[int, int]) -> None:
    for saved in splits:
        load_flat(root / f"{saved[0]}x{saved[1]}", *wanted)


def load_unflattened(directory: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for axis in (0, 1):
        if (2, 6)[axis] % world_size:
            continue
        local = GLOBAL.chunk(world_size, dim=axis)[rank]
        target = torch.zeros(local.shape[::-1]).t()  # not contiguous, and of another dtype
        wanted = ShardedTensor.from_rank_offsets("w", target, (axis, rank, world_size))
        loaded = dist_checkpointing.load({"w": wanted}, directory)["w"]  # type: ignore[call-overload]
        assert torch.equal(loaded, local.float())
        assert torch.equal(target, local.float())


def save_unflattened(directory: Path) -> None:
    rank = dist.get_rank()
    whole = ShardedTensor.from_rank_offsets("w", GLOBAL[:, 3 * rank : 3 * rank + 3], (1, rank, 2))
    dist_checkpointing.save({"w": whole}, directory)


def test_flattened_and_unflattened_read_each_other(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    (tmp_path / "whole").mkdir()
    ranks.run(save_flat, 4, (tmp_path / "flat", 2, 2))
    ranks.run(save_unflattened, 2, (tmp_path / "whole",))
    for world_size in (1, 2, 3):
        ranks.run(load_unflattened, world_size, (tmp_path / "flat",))
    ranks.run(load_flat, 6, (tmp_path / "whole", 2, 3))
    described = dist_checkpointing.load_tensors_metadata(tmp_path / "flat")["w"]
    assert described.global_shape == (2, 6)
    assert torch.equal(dist_checkpointing.load_plain_tensors(tmp_path / "flat")["w"], GLOBAL)


def save_with_a_gap(directory: Path) -> str:
    rank = dist.get_rank()
    held = slice(0, 4) if rank == 0 else slice(5, 12)
    piece = ShardedTensor.from_rank_offsets_flat("w", torch.zeros(held.stop - held.start), (2, 6), flattened_range=held)
    with pytest.raises(CheckpointingException) as caught:
        dist_checkpointing.save({"w": piece}, directory)
    return str(caught.value)


def test_slices_that_leave_a_gap_are_told_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    texts = ranks.run(save_with_a_gap, 2, (tmp_path,))
    assert texts[0] == texts[1]
    assert "'w'" in texts[0]
    assert not list(tmp_path.iterdir())


def save_many(directory: Path, wrapped: Any) -> None:
    """Prepended axes, empty slices and replicas, as a distributed optimizer has them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layers = {}
    for layer in range(3):
        cell = torch.arange(20.0) + 100 * layer
        bounds = [0, 0, 13, 20] if world_size == 3 else [0, 7, 20]
        held = slice(bounds[rank], bounds[rank + 1])
        data = cell[held].clone() if wrapped is None else torch.zeros(held.stop - held.start)
        layers[layer] = ShardedTensor.from_rank_offsets_flat(
            "layers", data, (4, 5), (0, layer, 3), prepend_axis_num=1, flattened_range=held
        )
    if wrapped is None:
        dist_checkpointing.save(layers, directory)
        return
    loaded = dist_checkpointing.load(layers, directory)
    for layer in range(3):
        found = loaded[layer]  # type: ignore[call-overload]
        assert torch.equal(found, (torch.arange(20.0) + 100 * layer)[layers[layer].flattened_range])


def test_prepended_axes_and_empty_slices(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_many, 3, (tmp_path, None))
    ranks.run(save_many, 2, (tmp_path, "load"))
    ranks.run(save_many, 3, (tmp_path, "load"))
    assert dist_checkpointing.load_plain_tensors(tmp_path)["layers"].shape == (3, 4, 5)
