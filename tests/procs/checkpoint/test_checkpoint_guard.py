"""Snapshots by protected pages on several ranks, written by a thread or by a worker process, while training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from remesh import dist_checkpointing
from remesh.checkpoint.background.page_guard import LEAST_BYTES
from remesh.dist_checkpointing import ShardedTensor
from remesh.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from remesh.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from remesh.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from remesh.testbed.pool import RankPool

NUM_SAVES = 3
NUM_ELEMENTS = LEAST_BYTES  # four times as many bytes: several of the blocks in which pages are copied


def state_of(part: torch.Tensor, same: torch.Tensor) -> dict[str, Any]:
    """A tensor that is cut, one that all have, and a small one, which is copied at once."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {
        "cut": ShardedTensor.from_rank_offsets("cut", part, (0, rank, world_size)),
        "same": ShardedTensor.from_rank_offsets("same", same, replica_id=rank),
        "small": ShardedTensor.from_rank_offsets("small", part[:10].clone(), (0, rank, world_size)),
    }


def save_and_train_on(root: Path, worker: str) -> list[bool]:
    """Whether pages were guarded, save by save; every save holds what was there when it was begun."""
    rank = dist.get_rank()
    part, same = torch.empty(NUM_ELEMENTS), torch.empty(NUM_ELEMENTS)
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(snapshots="guard"))
    queue, guarded = AsyncCallsQueue(worker=worker), []
    for number in range(NUM_SAVES):
        (root / str(number)).mkdir(exist_ok=True)
        dist.barrier()
        part.fill_(10 * number + rank)
        same.fill_(100 + number)
        state = state_of(part, same)
        request = dist_checkpointing.save(state, root / str(number), strategy, async_sharded_save=True)
        assert request is not None
        guarded.append(request.async_fn_args[1].guarded is not None)
        queue.schedule_async_request(request)
        for tensor in (same, part):
            tensor.fill_(-1)  # waits for the pages that are not copied yet
        queue.maybe_finalize_async_calls()
    queue.close()
    for number in range(NUM_SAVES):
        wanted = state_of(torch.zeros(NUM_ELEMENTS), torch.zeros(NUM_ELEMENTS))
        loaded: Any = dist_checkpointing.load(wanted, root / str(number))
        assert loaded["cut"].eq(10 * number + rank).all()
        assert loaded["small"].eq(10 * number + rank).all()
        assert loaded["same"].eq(100 + number).all()
    return guarded


def run(ranks: RankPool, num_ranks: int, root: Path, worker: str) -> None:
    guarded = ranks.run(save_and_train_on, num_ranks, (root, worker))
    if not any(map(any, guarded)):
        pytest.skip("userfaultfd is not allowed here (Linux 6.4; root or vm.unprivileged_userfaultfd)")
    assert guarded == [[True] * NUM_SAVES] * num_ranks


def test_every_rank_guards_its_own_pages(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, 3, tmp_path, "thread")


@pytest.mark.long
def test_a_worker_process_writes_what_another_process_has_copied(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, 2, tmp_path, "process")
