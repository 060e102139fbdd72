"""Plans that are remembered: fewer bytes are told, and a change on a single rank is noticed by all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import remesh
from remesh import dist_checkpointing
from remesh.comm import agreement
from remesh.dist_checkpointing import ShardedObject, ShardedTensor
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from remesh.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from remesh.testbed.pool import RankPool


class Ear:
    """Counts how often all parts were told."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_tellings = 0
        in_full = agreement._gather_parts

        def listen(*args: Any) -> Any:
            self.num_tellings += 1
            return in_full(*args)

        patch.setattr(agreement, "_gather_parts", listen)

    def during(self, act: Callable[[], Any]) -> int:
        before = self.num_tellings
        act()
        return self.num_tellings - before


def state(value: float, cols: int = 3) -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((2, cols), value + rank), (0, rank, world_size)),
        "both": ShardedTensor.from_rank_offsets("both", torch.full((4,), value), replica_id=rank),
        "rng": ShardedObject("rng", {"at": int(value)}, (world_size,), (rank,)),
        "step": value,
    }


def save_again_and_again(root: Path) -> list[int]:
    strategy = TorchDistSaveShardedStrategy(cached_metadata=True)
    with pytest.MonkeyPatch.context() as patch:
        ear = Ear(patch)

        def save(number: int, cols: int = 3) -> None:
            if dist.get_rank() == 0:
                (root / str(number)).mkdir()
            dist.barrier()
            dist_checkpointing.save(state(float(number), cols), root / str(number), strategy)

        counts = [ear.during(partial(save, number)) for number in range(3)]
        counts.append(ear.during(lambda: save(3, cols=4)))
        counts.append(ear.during(lambda: save(4)))
    for number in range(5):
        wanted = state(float(number), cols=4 if number == 3 else 3)
        loaded: Any = dist_checkpointing.load(state(-1.0, cols=4 if number == 3 else 3), root / str(number))
        assert torch.equal(loaded["w"], wanted["w"].data)
        assert torch.equal(loaded["both"], wanted["both"].data)
        assert (loaded["rng"], loaded["step"]) == ({"at": number}, number)
    return counts


def test_a_state_that_does_not_change_is_told_once(ranks: RankPool, tmp_path: Path) -> None:
    # Once for what is held and once for what was written; both states are remembered.
    assert ranks.run(save_again_and_again, 3, (tmp_path,)) == [[2, 0, 0, 2, 0]] * 3


def change_on_one_rank(root: Path) -> str:
    rank = dist.get_rank()
    strategy = TorchDistSaveShardedStrategy()
    for number in range(2):
        (root / str(number)).mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state(0.0), root / "0", strategy)
    changed = state(1.0)
    if rank == 1:
        changed["both"].replica_id = 0
    with pytest.raises(CheckpointingException) as caught:
        dist_checkpointing.save(changed, root / "1", strategy)
    dist_checkpointing.save(state(1.0), root / "1", strategy)
    return str(caught.value)


def test_a_change_on_one_rank_is_checked_by_all(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(change_on_one_rank, 3, (tmp_path,))
    assert "'both'" in answers[0]
    assert "2 main replicas, on ranks [0, 1]" in answers[0]
    assert len(set(answers)) == 1


def save_plain_states(root: Path) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        ear = Ear(patch)
        counts = []
        for number in range(3):
            plain = {"w": torch.full((5,), float(number)), "nested": [torch.arange(3) + number, "text"]}
            counts.append(ear.during(partial(remesh.save, plain, root / str(number))))
    for number in range(3):
        loaded = remesh.load({"w": torch.zeros(5), "nested": [torch.zeros(3).long(), ""]}, root / str(number))
        assert loaded["w"].eq(number).all()
        assert loaded["nested"][0].tolist() == [number, number + 1, number + 2]
    return counts


def test_plain_states_are_told_once_too(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(save_plain_states, 2, (tmp_path,)) == [[3, 0, 0]] * 2


def share_the_writing(root: Path) -> tuple[list[int], bool]:
    wrapped = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), do_cache_distribution=True)
    with pytest.MonkeyPatch.context() as patch:
        ear = Ear(patch)
        counts = []
        for number in range(3):
            (root / str(number)).mkdir(exist_ok=True)
            dist.barrier()
            saved, directory = state(float(number), cols=3 if number < 2 else 6), root / str(number)
            counts.append(ear.during(partial(dist_checkpointing.save, saved, directory, wrapped)))
    plain = dist_checkpointing.load_plain_tensors(root / "2")
    return counts, bool(plain["w"].shape[1] == 6 and plain["both"].eq(2).all())


def test_a_cached_distribution_is_made_anew_when_the_shards_change(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(share_the_writing, 2, (tmp_path,)) == [([3, 0, 3], True)] * 2
