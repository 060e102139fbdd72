"""The two programs that every user of distributed checkpoints knows: save on W ranks, load on another number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from remesh import dist_checkpointing
from remesh.testbed.pool import RankPool


def save_sample(root: Path) -> None:
    native, ours = root / "native", root / "dist_ckpt"
    for directory in (native, ours):
        directory.mkdir(exist_ok=True, parents=True)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    num_elems = 128 // world_size
    local = torch.arange(start=num_elems * rank, end=num_elems * (rank + 1))
    torch.save({"weight": local}, native / f"ckpt_{rank}.pt")
    shard = dist_checkpointing.ShardedTensor.from_rank_offsets("weight", local, (0, rank, world_size))
    dist_checkpointing.save({"weight": shard}, ours)


def load_sample(root: Path) -> int:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    num_elems = 128 // world_size
    local = torch.empty(num_elems)
    shard = dist_checkpointing.ShardedTensor.from_rank_offsets("weight", local, (0, rank, world_size))
    loaded = dist_checkpointing.load({"weight": shard}, root / "dist_ckpt")
    expected = torch.arange(start=num_elems * rank, end=num_elems * (rank + 1))
    assert torch.all(loaded["weight"] == expected)
    assert loaded["weight"].data_ptr() == local.data_ptr()
    return int(loaded["weight"].sum())


@pytest.mark.parametrize("num_savers", [1, 4, *(pytest.param(num, marks=pytest.mark.slow) for num in (2, 8))])
def test_the_sample_loads_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path, num_savers: int) -> None:
    ranks.run(save_sample, num_savers, (tmp_path,))
    for num_loaders in (1, 2, 4, 8):
        assert sum(ranks.run(load_sample, num_loaders, (tmp_path,))) == sum(range(128))


def save_keyed(directory: Path) -> None:
    rank = dist.get_rank()
    shard = dist_checkpointing.ShardedTensor.from_rank_offsets("tensor-A", torch.full((2,), rank), (0, rank, 4))
    rng = dist_checkpointing.ShardedObject("rng", {"rank": rank}, (4,), (rank,))
    copy = dist_checkpointing.ShardedTensor.from_rank_offsets("copy", torch.ones(3), replica_id=rank)
    dist_checkpointing.save({"ignored": shard, "o": rng, "c": copy, "common": {"step": 3}}, directory)


def load_keyed(directory: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_elems = 8 // world_size
    request = {
        "different-key": dist_checkpointing.ShardedTensor.from_rank_offsets(
            "tensor-A", torch.empty(num_elems), (0, rank, world_size)
        ),
        "rng": [dist_checkpointing.ShardedObject("rng", None, (4,), (at,)) for at in range(rank, 4, world_size)],
        "copy": dist_checkpointing.ShardedTensor.from_rank_offsets("copy", torch.zeros(3), replica_id=rank),
    }
    loaded = dist_checkpointing.load(request, directory)
    assert "ignored" not in loaded
    assert "tensor-A" not in loaded
    everything = torch.arange(4).repeat_interleave(2)
    assert torch.equal(loaded["different-key"], everything[num_elems * rank : num_elems * (rank + 1)].float())
    assert loaded["rng"] == [{"rank": at} for at in range(rank, 4, world_size)]
    assert loaded["copy"].eq(1).all()
    assert loaded["common"] == {"step": 3}


def test_keys_objects_replicas_and_common_data_survive_another_world_size(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_keyed, 4, (tmp_path,))
    for world_size in (1, 2, 4):
        ranks.run(load_keyed, world_size, (tmp_path,))


def load_natively(root: Path) -> list[int]:
    state = {"weight": torch.zeros(128, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=root / "dist_ckpt")
    return [int(value) for value in state["weight"]]


def test_native_torch_reads_the_sample(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_sample, 4, (tmp_path,))
    assert ranks.run(load_natively, 2, (tmp_path,)) == [list(range(128))] * 2


def load_strictly(directory: Path) -> tuple[set[str], set[str]]:
    rank = dist.get_rank()
    request = {"w": dist_checkpointing.ShardedTensor.from_rank_offsets("copy", torch.zeros(3), replica_id=rank)}
    if rank == 1:
        request["extra"] = dist_checkpointing.ShardedTensor.from_rank_offsets("extra", torch.zeros(3))
    _, missing, unexpected = dist_checkpointing.load(request, directory, strict="return_all")
    return missing, unexpected


def test_missing_keys_are_those_that_no_rank_asks_for(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_keyed, 4, (tmp_path,))
    assert ranks.run(load_strictly, 2, (tmp_path,)) == [
        ({"tensor-A", "rng"}, set()),
        ({"tensor-A", "rng"}, {"extra"}),
    ]
