"""Queue of background saves: requests, finished on all ranks in order.

Definitions. A *request* is what is left of a save once its values have been copied: a function that writes, which
calls no other rank, and functions that finish, which do. A request is *unfinalized* until those have run.

    schedule   every rank: the request waits for the worker; nothing is written to the caller's memory or read from it
    (write)    worker of each rank, one request after another
    finalize   every rank, at a time of the caller's choosing: count how many requests are written everywhere; for each
               of them, in order, run the functions that finish

The function that writes the index and commits is a `Settling`: it begins when a call finds the request written, works
on a thread, and ends when a later call finds it done on all ranks, so no call waits for a disk.

Requests finish in the order in which they were scheduled. A write that failed on any rank is raised on all of them
when it would be finalized; its checkpoint does not exist, and later requests go on.

The end of the program finalizes what is left of a queue of one rank. Of several ranks it cannot: another rank may have
failed, and would never come. Then the log names the saves that are lost, and the exit code is not 0. A fork leaves all
requests to its parent.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from weakref import WeakSet

from remesh.checkpoint.background.settling import Settling
from remesh.checkpoint.background.writers import (
    AsyncCaller,
    AsyncRequest,
    PersistentAsyncCaller,
    Progress,
    TemporalAsyncCaller,
    ThreadAsyncCaller,
)
from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.comm.gather import Group, all_gather_json, gather_from, group_rank, group_size
from remesh.foundation.errors import PeerError
from remesh.foundation.thread_pool import before_end, fail_at_end
from remesh.foundation.torch_private import never_compiled

logger = logging.getLogger(__name__)
_CALLERS: dict[str, Callable[[], AsyncCaller]] = {
    "thread": ThreadAsyncCaller,
    "process": PersistentAsyncCaller,
    "process per save": TemporalAsyncCaller,
}
_ALL: WeakSet[AsyncCallsQueue] = WeakSet()
_UNFINISHED: dict[AsyncCallsQueue, None] = {}
"""Queues with unfinalized requests, in the order of their first; a program may have forgotten them."""
_LOST: list[AsyncCallsQueue] = []
"""Queues whose saves were lost at the end."""


@never_compiled
class AsyncCallsQueue:
    """The unfinalized requests of a rank. Every rank of the group has one and makes the same calls on it.

    ``worker`` is what writes: ``"thread"``, which is the default; ``"process"``, which ``persistent`` means too: one
    process for all requests; or ``"process per save"``. At most ``max_unfinalized`` requests wait: scheduling one more
    first finalizes the oldest, which bounds the number of copies.
    """

    def __init__(
        self,
        persistent: bool = False,
        *,
        worker: str | None = None,
        max_unfinalized: int = 2,
        process_group: Group = None,
    ) -> None:
        worker = worker or ("process" if persistent else "thread")
        if max_unfinalized < 1:
            raise CheckpointingException(
                f"making a queue of saves: max_unfinalized is {max_unfinalized}, expected >= 1"
            )
        if worker not in _CALLERS:
            raise CheckpointingException(
                f"making a queue of saves: worker is {worker!r}, expected one of {', '.join(map(repr, _CALLERS))}"
            )
        self.persistent = worker == "process"
        self._make_caller = _CALLERS[worker]
        self._max_unfinalized = max_unfinalized
        self._group = process_group
        self._caller: AsyncCaller | None = None
        self._unfinalized: deque[AsyncRequest] = deque()
        self._begun = False
        """Whether the oldest request is written on all ranks, and being settled."""
        self._num_scheduled = 0
        self._first_of_caller = 0
        """Number of the first request that the present worker was given."""
        self._num_ranks = 1
        """Of the group, when the last request was scheduled."""
        _ALL.add(self)

    @staticmethod
    def warmup_persistent_caller(
        rank: int = 0, mp_mode: str = "spawn", cpu_priority: int = 10, io_priority: int | None = None
    ) -> None:
        """Start a worker process before the first save needs it. Calls no other rank and does not wait.

        The first queue of this process that writes in a worker takes it. ``cpu_priority`` is the niceness of workers.
        ``rank``, ``mp_mode`` and ``io_priority`` are accepted for the sake of callers: a worker is always a fresh
        interpreter, and serves the rank that started it.
        """
        PersistentAsyncCaller.prepare(cpu_priority)

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Let a request be written in the background; returns its number. Called by every rank.

        Returns at once, unless as many requests as the queue takes are unfinalized: then it waits for the oldest.
        """
        while len(self._unfinalized) >= self._max_unfinalized:
            self._finalize()
        self._num_ranks = group_size(self._group)
        is_at_end = not before_end(_finish_all)
        _UNFINISHED[self] = None
        caller = self._present_caller()
        number = self._num_scheduled
        self._num_scheduled += 1
        request = async_request.freeze()._replace(call_idx=number)
        caller.schedule(request)
        # The queue needs what is left to do only; the worker drops the copies as soon as they are written.
        self._unfinalized.append(
            request._replace(async_fn=None, async_fn_args=(), async_fn_kwargs={}, preload_fn=None, receive_fn=None)
        )
        if is_at_end:
            self._finish_at_end()
        return number

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the requests that are written on all ranks, or with ``blocking`` all; returns their numbers.

        Called by every rank, unless with ``no_dist`` only this rank's own worker counts. Raises on all ranks alike
        when a write failed; requests before that one are finalized, those after it stay in the queue.
        """
        if blocking:
            return [self._finalize(no_dist) for _ in range(len(self._unfinalized))]
        if not self._unfinalized:
            return []
        num_written, is_settled = self._num_written(), self._is_settled()
        if not no_dist and group_size(self._group) > 1:
            everywhere = all_gather_json([num_written, is_settled], self._group)
            num_written, is_settled = min(one[0] for one in everywhere), all(one[1] for one in everywhere)
        done: list[int] = []
        while len(done) < num_written and is_settled:
            is_settled = self._begun or not self._begin(no_dist)
            if is_settled:
                done.append(self._finalize(no_dist))
        return done

    def get_num_unfinalized_calls(self) -> int:
        """How many scheduled requests are not finalized."""
        return len(self._unfinalized)

    def progress(self) -> list[Progress]:
        """How far this rank's writes of the unfinalized requests are, oldest first. Calls no other rank."""
        if self._caller is None:
            return []
        current_bytes, num_written = self._caller.written_bytes(), self._num_written()
        return [
            Progress(
                request.call_idx,
                request.total_bytes if at < num_written else current_bytes if at == num_written else 0,
                request.total_bytes,
            )
            for at, request in enumerate(self._unfinalized)
        ]

    def close(self, abort: bool = False) -> None:
        """Finalize all requests and let the worker end; with ``abort`` drop them, so that no checkpoint comes of them.

        Called by every rank. Requests go on after one that failed; the first error is raised when all are done. The
        queue may be used again.
        """
        errors: list[Exception] = []
        try:
            while self._unfinalized and not abort:
                try:
                    self._finalize()
                except PeerError:  # the others would wait as long
                    raise
                except Exception as raised:
                    logger.error("closing a queue of saves: %s", raised)
                    errors.append(raised)
        finally:
            for settling in self._settlings():
                settling.wait()
            self._forget_requests()
            if self._caller is not None:
                self._caller.close(abort)
                self._caller = None
        if errors:
            raise errors[0]

    def _present_caller(self) -> AsyncCaller:
        if self._caller is None:
            self._caller, self._first_of_caller = self._make_caller(), self._num_scheduled
        return self._caller

    def _num_written(self) -> int:
        """How many of the unfinalized requests this rank has written."""
        assert self._caller is not None
        if not self._unfinalized:
            return 0
        return self._caller.num_written() + self._first_of_caller - self._unfinalized[0].call_idx

    def _settlings(self) -> list[Settling]:
        """The threads that finish the oldest request; an empty list until they have started."""
        if not self._begun:
            return []
        return [fn for fn in self._unfinalized[0].finalize_fns if isinstance(fn, Settling)]

    def _is_settled(self) -> bool:
        return not self._begun or all(settling.is_done() for settling in self._settlings())

    def _begin(self, no_dist: bool) -> bool:
        """Publish how the oldest request was written; whether the function that comes first is settling it now.

        Called by every rank, and so is `_finalize`; a request for which either raises is finalized by that.
        """
        request = self._unfinalized[0]
        caller, number = self._caller, request.call_idx - self._first_of_caller
        assert caller is not None

        def tell() -> None:
            caller.wait(number + 1)
            if (error := caller.error_of(number)) is not None:
                raise error

        first = request.finalize_fns[0] if request.finalize_fns else None
        try:
            if no_dist:
                tell()
            else:
                gather_from(tell, self._group, f"saving a checkpoint in the background (request {request.call_idx})")
            if isinstance(first, Settling):
                first.begin()
        except BaseException:
            self._take_oldest()
            raise
        self._begun = True
        return isinstance(first, Settling)

    def _finalize(self, no_dist: bool = False) -> int:
        """Finish the oldest request, waiting where it is not done; returns its number."""
        if not self._begun:
            self._begin(no_dist)
        self._begun = False
        request = self._take_oldest()
        for fn in request.finalize_fns:
            fn()
        return request.call_idx

    def _take_oldest(self) -> AsyncRequest:
        request = self._unfinalized.popleft()
        if not self._unfinalized:
            _UNFINISHED.pop(self, None)
        return request

    def _forget_requests(self) -> None:
        self._unfinalized.clear()
        self._begun = False
        _UNFINISHED.pop(self, None)

    def _finish_at_end(self) -> None:
        if self._num_ranks > 1:
            _LOST.append(self)
            logger.error(
                "the program ends with %s background saves that were not finalized, whose checkpoints do not exist; "
                "call close() of their queue on all ranks before the end",
                len(self._unfinalized),
            )
            return
        try:
            self.close()
        except Exception:  # the log has it
            _LOST.append(self)

    def _leave_to_parent(self) -> None:
        self._caller = None
        self._forget_requests()

    def __repr__(self) -> str:
        return f"AsyncCallsQueue(rank {group_rank(self._group)}, {len(self._unfinalized)} unfinalized)"


@fail_at_end
def _is_save_lost() -> bool:
    return bool(_LOST)


def _finish_all() -> None:
    for queue in tuple(_UNFINISHED):
        queue._finish_at_end()


def _begin_anew_in_fork() -> None:
    for queue in tuple(_ALL):
        queue._leave_to_parent()


os.register_at_fork(after_in_child=_begin_anew_in_fork)
