"""How does a save go on behind the training loop? Requests, and the queue that finishes them on all ranks.

Definitions. A *request* is what is left of a save once its values have been copied: a function that writes, which
calls no other rank, and functions that finish, which do. A request is *unfinalized* until those have run.

    schedule   every rank: the request waits for the worker; nothing is written to the caller's memory or read from it
    (write)    worker thread of each rank, one request after another
    finalize   every rank, at a time of the caller's choosing: count how many requests are written everywhere; for each
               of them, in order, run the functions that finish, the last of which commits the checkpoint

Requests finish in the order in which they were scheduled. A write that failed on any rank is raised on all of them
when it would be finalized; its checkpoint does not exist, and later requests go on.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from remesh.dist_checkpointing.errors import CheckpointingException
from remesh.reshard.running.exchange import Group, all_gather_json, gather_from, group_rank


class AsyncRequest(NamedTuple):
    """What is left to do for a save."""

    async_fn: Callable[..., None] | None
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

    def write(self) -> None:
        """Run the writing function. Calls no other rank."""
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            if len(args) < 2:
                raise CheckpointingException(
                    f"writing in the background: found preload_fn and {len(args)} arguments, expected at least 2, of "
                    "which its value replaces the second"
                )
            args[1] = self.preload_fn()
        if self.async_fn is not None:
            self.async_fn(*args, **self.async_fn_kwargs)

    def freeze(self) -> AsyncRequest:
        """The same request, which takes no further functions."""
        return self._replace(is_frozen=True)


class AsyncCaller(ABC):
    """Runs the writes of one rank, in order."""

    @abstractmethod
    def schedule(self, request: AsyncRequest) -> None:
        """Let the request be written after those before it. Returns at once."""

    @abstractmethod
    def num_written(self) -> int:
        """How many of the scheduled requests have been written or have failed."""

    @abstractmethod
    def wait(self, num_requests: int) -> None:
        """Return when that many requests have been written or have failed."""

    @abstractmethod
    def error_of(self, number: int) -> BaseException | None:
        """Why the request of that number failed, counted from 0, or None."""

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """Let the worker end; with ``abort`` requests that have not begun are dropped."""


class ThreadAsyncCaller(AsyncCaller):
    """A worker thread, started with the first request. Copying and writing hold no lock of the interpreter for long."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[AsyncRequest | None] = SimpleQueue()
        self._errors: list[BaseException | None] = []
        """One per request that is written, in order. Guarded by the condition, like ``_aborted``."""
        self._changed = threading.Condition()
        self._aborted = False
        self._thread: threading.Thread | None = None

    def schedule(self, request: AsyncRequest) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
            self._thread.start()
        self._waiting.put(request)

    def num_written(self) -> int:
        with self._changed:
            return len(self._errors)

    def wait(self, num_requests: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._errors) >= num_requests)

    def error_of(self, number: int) -> BaseException | None:
        with self._changed:
            return self._errors[number]

    def close(self, abort: bool = False) -> None:
        with self._changed:
            self._aborted = abort
        if self._thread is not None:
            self._waiting.put(None)
            # The request being written is waited for even so: its directory may be used again afterwards.
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (request := self._waiting.get()) is not None:
            error: BaseException | None = None
            with self._changed:
                dropped = self._aborted
            try:
                if dropped:
                    raise CheckpointingException("writing in the background: the queue was aborted before it began")
                request.write()
            except BaseException as raised:  # told to all ranks when the request is finalized
                error = raised
            del request  # the copies that it holds can go now, not when the next request comes
            with self._changed:
                self._errors.append(error)
                self._changed.notify_all()


class AsyncCallsQueue:
    """The unfinalized requests of a rank. Every rank of the group has one and makes the same calls on it.

    At most ``max_unfinalized`` requests wait: scheduling one more first finalizes the oldest, which bounds the memory
    that copies take. ``persistent`` is accepted for the sake of callers; the worker always lives as long as the queue.
    """

    def __init__(self, persistent: bool = False, *, max_unfinalized: int = 2, process_group: Group = None) -> None:
        if max_unfinalized < 1:
            raise CheckpointingException(
                f"making a queue of saves: max_unfinalized is {max_unfinalized}, expected >= 1"
            )
        self.persistent = persistent
        self._max_unfinalized = max_unfinalized
        self._group = process_group
        self._caller: AsyncCaller | None = None
        self._unfinalized: deque[AsyncRequest] = deque()
        self._num_scheduled = 0
        self._first_of_caller = 0
        """Number of the first request that the present worker was given."""

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Let a request be written in the background; returns its number. Called by every rank.

        Returns at once, unless as many requests as the queue takes are unfinalized: then it waits for the oldest.
        """
        while len(self._unfinalized) >= self._max_unfinalized:
            self._finalize(1)
        if self._caller is None:
            self._caller, self._first_of_caller = ThreadAsyncCaller(), self._num_scheduled
        number = self._num_scheduled
        self._num_scheduled += 1
        request = async_request.freeze()._replace(call_idx=number)
        self._caller.schedule(request)
        # The queue needs what is left to do only; the worker drops the copies as soon as they are written.
        self._unfinalized.append(request._replace(async_fn=None, async_fn_args=(), async_fn_kwargs={}, preload_fn=None))
        return number

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the requests that are written on all ranks, or with ``blocking`` all; returns their numbers.

        Called by every rank, unless ``no_dist`` says that only this rank's own worker counts. Raises on all ranks alike
        when a write failed; requests before that one are finalized, those after it stay in the queue.
        """
        if not self._unfinalized:
            return []
        assert self._caller is not None
        num_ready = len(self._unfinalized)
        if not blocking:
            num_ready = self._caller.num_written() + self._first_of_caller - self._unfinalized[0].call_idx
            if not no_dist:
                num_ready = min(all_gather_json(num_ready, self._group))
        return self._finalize(num_ready, no_dist)

    def get_num_unfinalized_calls(self) -> int:
        """How many scheduled requests are not finalized."""
        return len(self._unfinalized)

    def close(self, abort: bool = False) -> None:
        """Finalize all requests and let the worker end; with ``abort`` drop them, so that no checkpoint comes of them.

        Called by every rank. The queue may be used again.
        """
        try:
            while self._unfinalized and not abort:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            self._unfinalized.clear()
            if self._caller is not None:
                self._caller.close(abort)
                self._caller = None

    def _finalize(self, num_requests: int, no_dist: bool = False) -> list[int]:
        assert self._caller is not None
        caller = self._caller
        done: list[int] = []
        for _ in range(num_requests):
            request = self._unfinalized.popleft()
            number = request.call_idx - self._first_of_caller

            def tell(number: int = number) -> None:
                caller.wait(number + 1)
                if (error := caller.error_of(number)) is not None:
                    raise error

            if no_dist:
                tell()
            else:
                gather_from(tell, self._group, f"saving a checkpoint in the background (request {request.call_idx})")
            for fn in request.finalize_fns:
                fn()
            done.append(request.call_idx)
        return done

    def __repr__(self) -> str:
        return f"AsyncCallsQueue(rank {group_rank(self._group)}, {len(self._unfinalized)} unfinalized)"
