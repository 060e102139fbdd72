"""Saves in the background: true snapshots, finalized on all ranks in order, failures told on all."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.plain import entities_of
from remesh.checkpoint.run import writer
from remesh.dist_checkpointing import ShardedObject, ShardedTensor, check_is_distributed_checkpoint
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from remesh.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from remesh.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from remesh.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from remesh.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from remesh.foundation.errors import StorageError
from remesh.testbed.pool import RankPool


def make(local: torch.Tensor, seed: dict[str, int]) -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {
        "w": ShardedTensor.from_rank_offsets("w", local, (0, rank, world_size)),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "f", local.view(-1), (2, 3), (0, rank, world_size), flattened_range=slice(0, 6)
        ),
        "rng": ShardedObject("rng", seed, (world_size,), (rank,)),
        "step": 1,
    }


def begin(state: dict[str, Any], directory: Path, wrapped: bool = False) -> AsyncRequest:
    strategy: Any = TorchDistSaveShardedStrategy()
    if wrapped:
        strategy = FullyParallelSaveStrategyWrapper(strategy)
    request = dist_checkpointing.save(state, directory, strategy, async_sharded_save=True)
    assert isinstance(request, AsyncRequest)
    return request


def save_and_train_on(root: Path, how: str) -> None:
    rank = dist.get_rank()
    directory = root / how
    if rank == 0:
        directory.mkdir()
    dist.barrier()
    local, seed = torch.full((2, 3), float(rank)), {"rank": rank}
    request = begin(make(local, seed), directory, wrapped=how == "wrapped")
    local.fill_(-1)  # training goes on: none of this may reach the file
    seed["rank"] = -1
    assert not check_is_distributed_checkpoint(directory)
    if how == "sync":
        request.execute_sync()
    else:
        queue = AsyncCallsQueue(persistent=how == "wrapped")
        assert queue.schedule_async_request(request) == 0
        assert queue.get_num_unfinalized_calls() == 1
        while not queue.maybe_finalize_async_calls():
            local.add_(1)
            time.sleep(0.005)  # more would keep the machine from what is waited for
        assert queue.get_num_unfinalized_calls() == 0
        queue.close()
    assert check_is_distributed_checkpoint(directory)
    target = torch.zeros(2, 3)
    loaded: Any = dist_checkpointing.load(make(target, {}), directory)
    assert loaded["w"].eq(rank).all()
    assert loaded["rng"] == {"rank": rank}
    assert loaded["flat"].eq(rank).all()


@pytest.mark.parametrize("how", ["thread", pytest.param("wrapped", marks=pytest.mark.slow), "sync"])
def test_what_is_saved_is_what_was_there_when_the_call_returned(ranks: RankPool, tmp_path: Path, how: str) -> None:
    # A worker process of each rank imports what it needs, which takes a busy machine half a minute.
    ranks.run(save_and_train_on, 2 if how == "wrapped" else 3, (tmp_path, how), timeout_s=240)


def save_several(root: Path) -> list[list[int]]:
    rank = dist.get_rank()
    queue = AsyncCallsQueue(max_unfinalized=2)
    hold = threading.Event()
    done = []
    with pytest.MonkeyPatch.context() as patch:
        write = writer.write_data_file
        if rank == 1:  # one rank is slow: nobody finalizes until it has written

            def slow(*args: Any) -> Any:
                assert hold.wait(100)
                return write(*args)

            patch.setattr(writer, "write_data_file", slow)
        for number in range(2):
            directory = root / str(number)
            directory.mkdir(exist_ok=True)
            dist.barrier()
            queue.schedule_async_request(begin(make(torch.full((2, 3), float(number)), {}), directory))
            done.append(queue.maybe_finalize_async_calls())
        assert not check_is_distributed_checkpoint(root / "0")
        hold.set()
        (root / "2").mkdir(exist_ok=True)
        dist.barrier()
        # The queue takes two: the third one waits until the first is finalized.
        queue.schedule_async_request(begin(make(torch.full((2, 3), 2.0), {}), root / "2"))
        assert check_is_distributed_checkpoint(root / "0")
        assert not check_is_distributed_checkpoint(root / "2")
        done.append(queue.maybe_finalize_async_calls(blocking=True))
    queue.close()
    for number in range(3):
        loaded: Any = dist_checkpointing.load(make(torch.zeros(2, 3), {}), root / str(number))
        assert loaded["w"].eq(number).all()
    return done


def test_requests_are_finalized_in_order_and_only_when_all_ranks_have_written(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(save_several, 3, (tmp_path,)) == [[[], [], [1, 2]]] * 3


def save_with_a_full_disk(root: Path) -> tuple[type[BaseException], str]:
    rank = dist.get_rank()
    queue = AsyncCallsQueue()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("bad", "good"):
        (root / name).mkdir(exist_ok=True)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(writer, "write_data_file", full)
        queue.schedule_async_request(begin(make(torch.ones(2, 3), {}), root / "bad"))
        with pytest.raises(StorageError) as caught:
            queue.maybe_finalize_async_calls(blocking=True)
    assert not check_is_distributed_checkpoint(root / "bad")
    queue.schedule_async_request(begin(make(torch.ones(2, 3), {}), root / "good"))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert check_is_distributed_checkpoint(root / "good")
    queue.close()
    return type(caught.value), str(caught.value)


def test_a_write_that_fails_on_one_rank_is_told_on_all_and_later_saves_go_on(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(save_with_a_full_disk, 3, (tmp_path,))
    assert len(set(answers)) == 1
    assert "No space left on device" in answers[0][1]
    assert "rank 2" in answers[0][1]


def abort_a_save(root: Path) -> None:
    queue = AsyncCallsQueue()
    queue.schedule_async_request(begin(make(torch.ones(2, 3), {}), root))
    queue.close(abort=True)
    assert queue.get_num_unfinalized_calls() == 0
    assert not check_is_distributed_checkpoint(root)
    dist.barrier()
    dist_checkpointing.save(make(torch.ones(2, 3), {}), root)
    assert check_is_distributed_checkpoint(root)


def test_an_aborted_save_leaves_nothing_visible_and_the_directory_free(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(abort_a_save, 2, (tmp_path,))


def save_by_a_plan_of_torch(root: Path) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    queue, plan = AsyncCallsQueue(), None
    for number in range(2):
        local = torch.full((2, 3), float(10 * number + rank))
        state = {"w": DTensor.from_local(local, mesh, [Shard(0)]), "step": number}
        writer = FileSystemWriterAsync(root / str(number))
        planned, agreed, told, *reused = save_state_dict_async_plan(state, writer, cached_ckpt_structure=plan)
        assert reused == [False, False]
        local.fill_(-1)  # what was copied is what is written
        function, preload, args = writer.get_save_function_and_args()
        finish = partial(save_state_dict_async_finalize, *planned)
        queue.schedule_async_request(AsyncRequest(function, tuple(args), [finish], {}, preload))
        queue.maybe_finalize_async_calls(blocking=True)
        plan = (agreed, told, True)
    queue.close()
    for number in range(2):
        got: Any = {"w": torch.zeros(2 * dist.get_world_size(), 3), "step": -1}
        loaded = remesh.load(got, root / str(number))
        assert loaded["w"][::2, 0].tolist() == [10 * number + at for at in range(dist.get_world_size())]
        assert loaded["step"] == number


def test_native_torch_plans_and_the_queue_writes(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_by_a_plan_of_torch, 2, (tmp_path,))


def save_a_plain_state(root: Path) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mesh, queue, strategy = init_device_mesh("cpu", (num_ranks,)), AsyncCallsQueue(), TorchDistSaveShardedStrategy()
    for number in range(2):
        (root / str(number)).mkdir(exist_ok=True)
        dist.barrier()
        local, same = torch.full((2, 3), 10.0 * number + rank), torch.full((4,), float(number))
        state = {"m": {"w": DTensor.from_local(local, mesh, [Shard(0)]), "b": same}, "step": number}
        described = entities_of(state)
        request = dist_checkpointing.save(described, root / str(number), strategy, async_sharded_save=True)
        assert request is not None
        queue.schedule_async_request(request)
        for tensor in (local, same):
            tensor.fill_(-1)
    queue.close()
    for number in range(2):
        wanted: Any = {"m": {"w": torch.zeros(2 * num_ranks, 3), "b": torch.zeros(4)}, "step": -1}
        loaded = remesh.load(wanted, root / str(number))
        assert loaded["m"]["w"][::2, 0].tolist() == [10 * number + at for at in range(num_ranks)]
        assert loaded["m"]["b"].eq(number).all() and loaded["step"] == number


def test_a_plain_state_of_several_ranks_is_saved_in_the_background(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_a_plain_state, 3, (tmp_path,))


def test_a_queue_that_is_closed_finishes_what_comes_after_a_write_that_failed() -> None:
    done: list[str] = []
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(os.rmdir, ("/nowhere/at/all",), [lambda: done.append("failed")]))
    queue.schedule_async_request(AsyncRequest(os.path.join, ("a", "b"), [lambda: done.append("good")]))
    with pytest.raises(FileNotFoundError, match="/nowhere/at/all"):
        queue.close()
    assert done == ["good"]
    assert queue.get_num_unfinalized_calls() == 0


def test_a_frozen_request_takes_no_further_functions() -> None:
    seen: list[Any] = []
    request = AsyncRequest(lambda a, b, c=0: seen.append((a, b, c)), (1, 2), [], {"c": 3}, preload_fn=lambda: "loaded")
    request.add_finalize_fn(lambda: seen.append("done"))
    with pytest.raises(RuntimeError, match="frozen"):
        request.freeze().add_finalize_fn(lambda: None)
    request.execute_sync()
    assert seen == [(1, "loaded", 3), "done"]
    with pytest.raises(CheckpointingException, match="max_unfinalized is 0"):
        AsyncCallsQueue(max_unfinalized=0)
