"""A background save of device memory, on several ranks: one refusal is told on all, and no checkpoint comes of it."""

from __future__ import annotations

import random
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.background import queue, saving_thread
from remesh.checkpoint.background.queue import AsyncCallsQueue
from remesh.checkpoint.background.staging import StagingBuffers
from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.checkpoint.plain import entities_of
from remesh.foundation.torch_private import timeout_of
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece
from remesh.testbed.pool import RankPool
from tests.fake_gpu import MakeBelieveDevice


def save_with_one_refusal(folder: Path, refused: str) -> str:
    """Rank 1's device refuses; then all save once more, and the device does what it is asked for."""
    rank = dist.get_rank()
    device = MakeBelieveDevice(random.Random(rank), [refused] * (rank == 1))
    local = device.empty(8)
    device.program.run(partial(local.fill_, float(rank)))
    state = {"w": Piece(local, (16,), (Shard(0, Box((8 * rank,), (8 * rank + 8,)), 0, (1,)),))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving_thread, "StagingBuffers", partial(StagingBuffers, devices=device))
        with pytest.raises(CheckpointingException) as raised:
            remesh.save(state, folder / "refused", background=True).result()
        device.refuses.clear()
        remesh.save(state, folder / "done", background=True).result()
    assert not device.faults
    return str(raised.value)


@pytest.mark.parametrize("refused", ["lock", "queue", "arrive"])
def test_a_refusal_of_one_device_is_told_on_all_ranks_and_leaves_no_checkpoint(
    ranks: RankPool, tmp_path: Path, refused: str
) -> None:
    told = ranks.run(save_with_one_refusal, 2, (tmp_path, refused))
    assert told[0] == told[1]
    assert "rank 1" in told[0]
    assert "make-believe error" in told[0]
    assert not list((tmp_path / "refused").glob("*.metadata"))
    assert not (tmp_path / "refused" / ".metadata").exists()
    assert (tmp_path / "done" / ".metadata").exists()


def _timeout_of_its_own() -> timedelta | None:
    own = saving_thread.thread_of(dist.new_group(timeout=timedelta(seconds=41))).group
    assert own is not None
    return timeout_of(own)


def test_the_group_of_a_saving_thread_waits_as_long_as_that_of_its_users(ranks: RankPool) -> None:
    assert ranks.run(_timeout_of_its_own, 2, ()) == [timedelta(seconds=41)] * 2


def _come_to_the_end(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    dist.barrier()
    request = dist_checkpointing.save(entities_of({"w": torch.ones(3)}), folder, async_sharded_save=True)
    assert request is not None
    waiting, told = AsyncCallsQueue(), list[str]()
    waiting.schedule_async_request(request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "_LOST", [])  # this process goes on
        patch.setattr(queue.logger, "error", lambda text, *values: told.append(text % values))
        queue._finish_all()
    waiting.close(abort=True)
    queue._finish_all()
    return told


def test_at_the_end_of_several_ranks_a_queue_tells_what_is_lost_and_waits_for_nobody(
    ranks: RankPool, tmp_path: Path
) -> None:
    for told in ranks.run(_come_to_the_end, 2, (tmp_path / "c",)):
        assert len(told) == 1
        assert "the program ends with 1 background saves that were not finalized" in told[0]
