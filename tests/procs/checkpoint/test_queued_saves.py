"""A background save of device memory, on several ranks: one refusal is told on all, and no checkpoint comes of it."""

from __future__ import annotations

import random
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import remesh
from remesh.checkpoint.background import saving_thread
from remesh.checkpoint.background.staging import StagingBuffers
from remesh.checkpoint.errors import CheckpointingException
from remesh.foundation.torch_private import timeout_of
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece
from remesh.testbed.pool import RankPool
from tests.make_believe import MakeBelieveDevice


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
