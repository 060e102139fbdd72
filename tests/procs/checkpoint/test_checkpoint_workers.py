"""Who writes: a thread or a worker process; what it is given, what comes back, and what happens when it dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from remesh import dist_checkpointing
from remesh.checkpoint.background import writers as async_callers
from remesh.checkpoint.background.staging import Copies, StagingBuffers
from remesh.checkpoint.background.writers import (
    AsyncCaller,
    AsyncRequest,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    ThreadAsyncCaller,
)
from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.dist_checkpointing import ShardedTensor
from remesh.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

pytestmark = pytest.mark.procs
KINDS = [ThreadAsyncCaller, PersistentAsyncCaller]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__, scope="module")
def caller(request: pytest.FixtureRequest) -> Iterator[AsyncCaller]:
    made = request.param()
    yield made
    made.close()


def perform(caller: AsyncCaller, request: AsyncRequest) -> BaseException | None:
    number = caller.num_written()
    caller.schedule(request)
    caller.wait(number + 1)
    return caller.error_of(number)


def test_the_value_of_the_function_comes_back(caller: AsyncCaller) -> None:
    values: list[Any] = []
    request = AsyncRequest(os.path.join, ("a", "b"), [], preload_fn=lambda: "c", receive_fn=values.append)
    assert perform(caller, request) is None
    assert values == ["a/c"]


def test_an_error_comes_back_as_it_was_raised(caller: AsyncCaller, tmp_path: Path) -> None:
    request = AsyncRequest(os.rmdir, (str(tmp_path / "nowhere"),), [])
    error = perform(caller, request)
    assert isinstance(error, FileNotFoundError)
    assert "nowhere" in str(error)
    assert perform(caller, AsyncRequest(os.path.join, ("a", "b"), [])) is None, "later requests go on"


def test_an_error_that_cannot_travel_is_told_in_its_words(caller: AsyncCaller) -> None:
    error = perform(caller, AsyncRequest(raise_a_local_error, (), []))
    assert isinstance(error, Exception)
    assert "only here" in str(error)


def raise_a_local_error() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("only here")


@pytest.mark.slow
def test_a_worker_per_request_ends_with_it() -> None:
    caller = TemporalAsyncCaller()
    values: list[Any] = []
    assert perform(caller, AsyncRequest(os.getpid, (), [], receive_fn=values.append)) is None
    with pytest.raises(ProcessLookupError):
        os.kill(values[0], 0)


def test_the_copies_themselves_are_seen_not_others(caller: AsyncCaller) -> None:
    copies = StagingBuffers().copy([torch.arange(6.0).reshape(2, 3), torch.tensor([True, False]), torch.zeros(0, 2)])
    request = AsyncRequest(copy_first_to, (copies, 9.0), [], total_bytes=24)
    assert perform(caller, request) is None
    assert copies.tensors[0].eq(9).all(), "the worker has written to the very memory"
    assert caller.written_bytes() == 0


def copy_first_to(copies: Copies, value: float, *, progress: Callable[[int], None]) -> None:
    progress(copies.tensors[0].nbytes)
    copies.tensors[0].fill_(value)


def test_a_worker_that_dies_or_cannot_find_a_function_fails_its_request_alone() -> None:
    caller = PersistentAsyncCaller()
    error = perform(caller, AsyncRequest(signal.raise_signal, (int(signal.SIGKILL),), []))
    assert isinstance(error, CheckpointingException)
    assert "ended before it had written (exit status -9" in str(error)
    values: list[Any] = []
    assert perform(caller, AsyncRequest(os.getpid, (), [], receive_fn=values.append)) is None
    assert values[0] != os.getpid()
    error = perform(caller, AsyncRequest(lambda: None, (), []))
    assert isinstance(error, CheckpointingException)
    assert "write in a thread" in str(error)
    caller.close()


def test_an_abort_does_not_wait_for_a_worker_process() -> None:
    caller = PersistentAsyncCaller()
    caller.schedule(AsyncRequest(signal.pause, (), []))
    caller.schedule(AsyncRequest(signal.pause, (), []))
    caller.close(abort=True)
    assert caller.num_written() == 2
    assert "aborted" in str(caller.error_of(1))


@pytest.mark.slow
def test_a_worker_that_was_warmed_up_on_the_class_serves_the_first_queue_that_needs_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []

    def count(cpu_priority: int, make: Any = async_callers._Worker) -> Any:
        started.append(make(cpu_priority))
        return started[-1]

    monkeypatch.setattr(async_callers, "_Worker", count)
    monkeypatch.setattr(PersistentAsyncCaller, "_cpu_priority", 0)
    AsyncCallsQueue.warmup_persistent_caller(0, mp_mode="fork", cpu_priority=2, io_priority=3)
    AsyncCallsQueue.warmup_persistent_caller(0, cpu_priority=2)
    values: list[Any] = []
    for number in (1, 2):
        queue = AsyncCallsQueue(persistent=True)
        queue.schedule_async_request(AsyncRequest(os.nice, (0,), [], receive_fn=values.append))
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        queue.close()
        assert len(started) == number
    assert values == [min(19, os.nice(0) + 2)] * 2
    AsyncCallsQueue.warmup_persistent_caller()
    PersistentAsyncCaller._end_spare()
    assert len(started) == 3 and PersistentAsyncCaller._spare is None


def test_a_queue_tells_how_far_it_is_and_a_worker_process_writes_what_a_thread_writes(tmp_path: Path) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(1000.0)), "step": 3}
    for worker in ("thread", "process"):
        queue = AsyncCallsQueue(worker=worker)
        queue.warmup_persistent_caller(cpu_priority=0)
        (tmp_path / worker).mkdir()
        request = dist_checkpointing.save(state, tmp_path / worker, async_sharded_save=True)
        assert request is not None and request.total_bytes == 4000
        queue.schedule_async_request(request)
        assert [one.total_bytes for one in queue.progress()] == [4000]
        assert queue.progress()[0].written_bytes in range(8000)
        queue.close()
        assert queue.progress() == []
    for name in ("__0_0.distcp", "common.pt", "metadata.json"):
        assert (tmp_path / "thread" / name).read_bytes() == (tmp_path / "process" / name).read_bytes()
    assert dist_checkpointing.load_plain_tensors(tmp_path / "process")["w"].tolist() == list(range(1000))


def test_a_worker_takes_the_signals_that_a_thread_of_ours_does_not(caller: AsyncCaller) -> None:
    """Who starts it is such a thread, and a worker must end when it is told to."""
    values: list[Any] = []
    assert (
        perform(caller, AsyncRequest(signal.pthread_sigmask, (signal.SIG_BLOCK, ()), [], receive_fn=values.append))
        is None
    )
    assert (signal.SIGTERM in values[0]) == isinstance(caller, ThreadAsyncCaller)
