"""Blocked time of a training loop by a save in the background, beside the same save in the foreground.

A thread or a process writes copies of the state.

Blocked is all the time in calls on the training loop's thread: beginning the save, scheduling it, asking now and then
whether it is written, and finishing it. The loop in between multiplies matrices; how much slower its steps are while a
save is being written is the slowdown. The first saves, which make plans and memory, do not count. The loop leaves the
state alone while it is written; what changing all of it right after the call costs is a row of its own.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.report import Row, at_most, spread_of
from remesh import dist_checkpointing
from remesh.dist_checkpointing import ShardedTensor
from remesh.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from remesh.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

_WARM_UP = 2


def blocked_time(
    tensors: dict[str, torch.Tensor],
    root: Path,
    repeat: int,
    workers: Sequence[str] = ("thread", "process"),
) -> list[Row]:
    """Rows of one state, for each way of writing it: a thread, a process."""
    state = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}
    size = f"{sum(tensor.nbytes for tensor in tensors.values()) >> 20} MiB"
    copy_s = _seconds_of_a_copy(list(tensors.values()))
    rows = []
    for worker in workers:
        strategy, queue = TorchDistSaveShardedStrategy(), AsyncCallsQueue(worker=worker)
        queue.warmup_persistent_caller()
        idle = statistics.median(_step() for _ in range(20))
        blocked, foreground, busy = [], [], []
        for at in range(repeat + _WARM_UP):
            in_front = root / f"front{at}"
            in_front.mkdir()
            started = time.perf_counter()
            dist_checkpointing.save(state, in_front, strategy)
            foreground.append(time.perf_counter() - started)
            seconds, steps = _save_behind(state, root / f"behind{at}", strategy, queue)
            blocked.append(seconds)
            busy += steps
            for path in root.iterdir():
                shutil.rmtree(path)
        changed = _change_behind(state, list(tensors.values()), root, strategy, queue, repeat)
        queue.close()
        blocked_s = statistics.median(blocked[_WARM_UP:])
        foreground_s = statistics.median(foreground[_WARM_UP:])
        # Who copies cannot be blocked for less than the copy takes.
        bound = copy_s / foreground_s
        over = blocked_s / foreground_s
        spread = spread_of(blocked[_WARM_UP:])
        case = f"{size} in the background by a {worker}"
        rows.append(at_most(f"{case}: blocked over foreground save", over, "ratio", 1 / 20, spread=spread, bound=bound))
        rows.append(Row(f"{case}: a plain copy over foreground save", bound, "ratio"))
        rows.append(Row(f"{case}: blocked over a plain copy", blocked_s / copy_s, "ratio", bound=1.0))
        rows.append(Row(f"{case}: blocked", blocked_s, "s"))
        rows.append(Row(f"{case}: changing all of the state meanwhile over at rest", changed, "ratio", bound=1.0))
        rows.append(Row(f"{case}: step while writing over step", statistics.median(busy) / idle, "ratio", bound=1.0))
    return rows


def _save_behind(
    state: dict[str, ShardedTensor], directory: Path, strategy: TorchDistSaveShardedStrategy, queue: AsyncCallsQueue
) -> tuple[float, list[float]]:
    """Seconds that the loop was blocked, and those of each step until the save is finished."""
    directory.mkdir()
    steps = []
    started = time.perf_counter()
    request = dist_checkpointing.save(state, directory, strategy, async_sharded_save=True)
    assert request is not None
    queue.schedule_async_request(request)
    blocked = time.perf_counter() - started
    while queue.get_num_unfinalized_calls():
        steps.append(_step())
        started = time.perf_counter()
        queue.maybe_finalize_async_calls()
        blocked += time.perf_counter() - started
    return blocked, steps


def _change_behind(
    state: dict[str, ShardedTensor],
    tensors: list[torch.Tensor],
    root: Path,
    strategy: TorchDistSaveShardedStrategy,
    queue: AsyncCallsQueue,
    repeat: int,
) -> float:
    """How much longer a change of the whole state takes right after a save has begun than when none is written."""
    during, at_rest = [], []
    for at in range(repeat):
        directory = root / f"changed{at}"
        directory.mkdir()
        at_rest.append(_change(tensors))
        request = dist_checkpointing.save(state, directory, strategy, async_sharded_save=True)
        assert request is not None
        queue.schedule_async_request(request)
        during.append(_change(tensors))
        queue.maybe_finalize_async_calls(blocking=True)
        shutil.rmtree(directory)
    return statistics.median(during) / statistics.median(at_rest)


def _change(tensors: list[torch.Tensor]) -> float:
    started = time.perf_counter()
    for tensor in tensors:
        tensor.mul_(-1)
    return time.perf_counter() - started


def _seconds_of_a_copy(tensors: list[torch.Tensor]) -> float:
    """The least that a snapshot of CPU memory costs: copies into memory that is there."""
    copies = [tensor.clone() for tensor in tensors]
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        best = min(best, time.perf_counter() - started)
    return best


_LEFT, _RIGHT = torch.rand(384, 384), torch.rand(384, 384)


def _step() -> float:
    started = time.perf_counter()
    for _ in range(4):
        torch.mm(_LEFT, _RIGHT)
    return time.perf_counter() - started
