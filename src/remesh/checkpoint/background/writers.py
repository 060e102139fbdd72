"""Background writers of a queue: a thread of this process, or a process of its own.

Each caller does its requests one at a time, in order. What differs is where the writing function runs:

    ThreadAsyncCaller       in that thread
    PersistentAsyncCaller   in a worker process that is started once and takes one request after another
    TemporalAsyncCaller     in a worker process that is started for each request and ends with it

A worker process is a fresh interpreter (`worker`), never a fork of one that has threads or a GPU, and it does not
run the caller's script again. Copies travel as descriptors of the memory they are in, so nothing is copied once more.
A worker that dies is an error of its request; the next one gets a new worker.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from typing import Any, ClassVar, NamedTuple

from remesh.checkpoint.background.worker_messages import Channel, WorkerError
from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.comm.gather import gather_from
from remesh.foundation.source_folder import SOURCE
from remesh.foundation.thread_pool import PooledExecutor

_END_GRACE_S = 30.0


def _ignore_progress(written_bytes: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class WriteCall:
    """A writing function with its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    progress: Callable[[int], None] | None
    """Takes the bytes written so far; None for a function that does not report them."""

    def __call__(self) -> Any:
        options = {} if self.progress is None else {"progress": self.progress}
        return self.function(*self.args, **self.kwargs, **options)


class AsyncRequest(NamedTuple):
    """The rest of a save: what a background writer runs, and what all ranks do when it has finished."""

    async_fn: Callable[..., Any] | None
    """Writes; runs in the background and calls no other rank. None when there is nothing to write."""
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], None]]
    """Run on every rank in order, after the write of every rank has succeeded."""
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - a default of a tuple's field, never changed
    preload_fn: Callable[[], Any] | None = None
    """If given, its value takes the place of the second of ``async_fn_args``; run before the write."""
    is_frozen: bool = False
    """Whether it is scheduled and takes no further functions."""
    call_idx: int = 0
    """Number of the request in its queue."""
    receive_fn: Callable[[Any], None] | None = None
    """Given what ``async_fn`` has returned, in this process, as soon as it has; on the thread that waited for it."""
    total_bytes: int = 0
    """If not 0, what ``async_fn`` is going to write: it then takes a function ``progress(bytes written so far)``."""

    def add_finalize_fn(self, fn: Callable[[], None]) -> None:
        """Let ``fn`` run after all others; RuntimeError when the request is frozen."""
        if self.is_frozen:
            raise RuntimeError("Cannot add finalization functions to a frozen AsyncRequest")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Write, wait for all ranks, finish. Called by every rank; a write that fails is raised on all ranks alike."""
        gather_from(self.write, None, "saving a checkpoint")
        for fn in self.finalize_fns:
            fn()

    def write(
        self, run: Callable[[WriteCall], Any] = WriteCall.__call__, progress: Callable[[int], None] = _ignore_progress
    ) -> None:
        """Do the writing call by ``run``, here by default. Calls no other rank."""
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            if len(args) < 2:
                raise CheckpointingException(
                    f"writing in the background: found preload_fn and {len(args)} arguments, expected at least 2, of "
                    "which its value replaces the second"
                )
            args[1] = self.preload_fn()
        if self.async_fn is None:
            return
        reported = progress if self.total_bytes else None
        value = run(WriteCall(self.async_fn, tuple(args), self.async_fn_kwargs, reported))
        if self.receive_fn is not None:
            self.receive_fn(value)

    def freeze(self) -> AsyncRequest:
        """The same request, which takes no further functions."""
        return self._replace(is_frozen=True)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the write of a request is on this rank."""

    call_idx: int
    written_bytes: int
    total_bytes: int
    """0 where the request does not have it."""


class AsyncCaller(ABC):
    """Runs the writes of one rank, in order, in the background."""

    def __init__(self) -> None:
        self._executor = PooledExecutor(1, "checkpoint-writer")
        self._writes: list[Future[None]] = []
        """One per request, in order."""
        self._num_written = 0
        self._written_bytes = 0
        self._is_aborted = False

    def schedule(self, request: AsyncRequest) -> None:
        """Let the request be written after those before it. Returns at once."""
        self._writes.append(self._executor.submit(self._write, request))

    def num_written(self) -> int:
        """How many of the scheduled requests have been written or have failed. Returns at once."""
        while self._num_written < len(self._writes) and self._writes[self._num_written].done():
            self._num_written += 1
        return self._num_written

    def written_bytes(self) -> int:
        """How many bytes of the request after those are written."""
        return self._written_bytes

    def wait(self, num_requests: int) -> None:
        """Return when that many requests have been written or have failed."""
        wait(self._writes[:num_requests])

    def error_of(self, number: int) -> BaseException | None:
        """Why the request of that number failed, counted from 0, or None. Waits for its end."""
        return self._writes[number].exception()

    def close(self, abort: bool = False) -> None:
        """Let the worker end; with ``abort`` requests that have not begun are dropped.

        Returns when nothing writes any more, so that directories may be used again.
        """
        self._is_aborted = abort
        if abort:
            self._interrupt()
        self._executor.shutdown()
        self._end()

    @abstractmethod
    def _run(self, call: WriteCall) -> Any:
        """Do a call; on the caller's thread."""

    def _interrupt(self) -> None:  # noqa: B027 - a thread cannot be
        """Break off the call that is being done, where that can be."""

    def _end(self) -> None:  # noqa: B027 - a thread needed nothing
        """Let go of what calls needed; no call is being done."""

    def _write(self, request: AsyncRequest) -> None:
        if self._is_aborted:
            raise CheckpointingException("writing in the background: the queue was aborted before it began")
        try:
            request.write(self._run, partial(setattr, self, "_written_bytes"))
        finally:
            self._written_bytes = 0


class ThreadAsyncCaller(AsyncCaller):
    """Writes in its thread. Copying, checksums and writing hold no lock of the interpreter for long."""

    def _run(self, call: WriteCall) -> Any:
        return call()


class _Worker:
    """A worker process and the channel to it. Started at once; it is ready some seconds later."""

    def __init__(self, cpu_priority: int) -> None:
        ours, theirs = Pipe()
        paths = [SOURCE, *filter(None, sys.path)]  # what this process can import, the worker can
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "remesh.checkpoint.background.writer_process"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(cpu_priority)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        self._channel = Channel(ours)

    def run(self, call: WriteCall) -> Any:
        kind: str = "progress"
        value: Any = None
        try:
            self._channel.send((call.function, call.args, call.kwargs, call.progress is not None))
            while kind == "progress":
                kind, value = self._channel.receive()
                if kind == "progress" and call.progress is not None:
                    call.progress(value)
        except (EOFError, OSError) as raised:
            raise WorkerError(
                f"writing in the background: the worker process {self._process.pid} ended before it had written "
                f"(exit status {self.end()}, {raised!r}); the save does not exist, save again"
            ) from raised
        if kind == "failed":
            raise value
        return value

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._process.kill()

    def end(self) -> int:
        """Let it end after what it is doing; returns its exit status."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_GRACE_S)
        self._process.kill()
        return self._process.wait()


class PersistentAsyncCaller(AsyncCaller):
    """Writes in one worker process: one that `prepare` has started, or started with the first request."""

    _cpu_priority = 0
    """Niceness of workers."""
    _spare: ClassVar[_Worker | None] = None
    """Started by `prepare`; the first caller that needs a worker takes it."""
    _spare_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    @staticmethod
    def prepare(cpu_priority: int = 10) -> None:
        """Start a worker for whichever caller of this process needs one first, and for all later ones its niceness."""
        shared = PersistentAsyncCaller
        with shared._spare_lock:
            shared._cpu_priority = cpu_priority
            if shared._spare is None:
                shared._spare = _Worker(cpu_priority)
                atexit.register(shared._end_spare)

    @staticmethod
    def _take_spare() -> _Worker | None:
        shared = PersistentAsyncCaller
        with shared._spare_lock:
            spare, shared._spare = shared._spare, None
        atexit.unregister(shared._end_spare)
        return spare

    @staticmethod
    def _end_spare() -> None:
        spare = PersistentAsyncCaller._take_spare()
        if spare is not None:
            spare.kill()
            spare.end()

    @staticmethod
    def _begin_anew_in_fork() -> None:
        """Leave the worker to the parent."""
        PersistentAsyncCaller._spare, PersistentAsyncCaller._spare_lock = None, threading.Lock()

    def _run(self, call: WriteCall) -> Any:
        with self._lock:
            worker = self._worker = self._worker or self._take_spare() or _Worker(self._cpu_priority)
        try:
            return worker.run(call)
        except WorkerError:
            with self._lock:
                self._worker = None
            raise

    def _interrupt(self) -> None:
        with self._lock:
            if self._worker is not None:
                self._worker.kill()

    def _end(self) -> None:
        with self._lock:
            if self._worker is not None:
                self._worker.end()
                self._worker = None


os.register_at_fork(after_in_child=PersistentAsyncCaller._begin_anew_in_fork)


class TemporalAsyncCaller(PersistentAsyncCaller):
    """Writes each request in a worker process of its own, so that no memory is held in between."""

    def _run(self, call: WriteCall) -> Any:
        try:
            return super()._run(call)
        finally:
            self._end()
