"""Background saves of plain states: on a thread, in a process group of their own.

Once the values are copied, what is left of a save is what it always is: write, agree on the index, commit. A thread of
each rank does it, and its collectives go through a gloo group of the same ranks, made for this alone. So the program
may use its own group meanwhile, and nothing waits for a call of the program: the checkpoint is there as soon as all
ranks have written. There is one thread for each group, so saves end in the order in which they began, on every rank.

That group is kept apart from torch's: ``destroy_process_group`` ends neither it nor a save. The end of the program
waits for saves, a fork of it does not (`remesh.foundation.thread_pool`). A save that fails is logged as well, since its
program may never ask; a failure that was never asked for before the end, and that no later save made up for, lets the
program end with an exit code other than 0.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch.distributed as dist

from remesh.checkpoint.background.staging import StagingBuffers
from remesh.comm.agreement import Agreements
from remesh.comm.gather import Group, gather_from
from remesh.foundation.thread_pool import PooledExecutor, fail_at_end
from remesh.foundation.torch_private import keep_apart, make_group, store_of, timeout_of

T = TypeVar("T")
logger = logging.getLogger(__name__)
_MAX_UNDER_WAY = 2
"""Saves whose copies are held at once; one more waits for the oldest."""


class BackgroundSave(Future[T]):
    """The future of what a saving thread does. It knows whether its error has been raised."""

    was_raised = False
    """Whether a caller has been given the error, if there is one."""

    def result(self, timeout: float | None = None) -> T:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        raised = super().exception(timeout)
        self.was_raised = raised is not None
        return raised

    def failure(self) -> BaseException | None:
        """Its error, without noting that it was given to a caller. Waits for the end."""
        return super().exception()


class SavingThread:
    """The thread that ends the saves of one group. Made by `thread_of`, on all ranks together."""

    def __init__(self, group: Group) -> None:
        self.group = group
        """For what the thread does, and nothing else."""
        self.plans = Agreements()
        """Of what the thread agrees on; the caller's own are not touched from here."""
        self.copies = StagingBuffers()
        self._executor = PooledExecutor(1, "save")
        self._under_way: deque[Future[object]] = deque()

    def make_room(self) -> None:
        """Wait until one more save may hold copies. What became of the others, their own handles report."""
        while len(self._under_way) >= _MAX_UNDER_WAY:
            wait([self._under_way.popleft()])

    def submit(self, act: Callable[[], T]) -> BackgroundSave[T]:
        """Let the thread end a save, after all that it was given before."""
        future = self.put(act)
        future.add_done_callback(_note_end)
        return future

    def put(self, act: Callable[[], T]) -> BackgroundSave[T]:
        """Let the thread do something else, after all that it was given before."""
        future = BackgroundSave[T]()
        self._executor.put(future, partial(self._do, act))
        self._under_way.append(future)  # type: ignore[arg-type]
        return future

    def _do(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except BaseException as raised:
            logger.error("in the background: %s", raised)
            raise


_failed: list[BackgroundSave[object]] = []
"""Saves that failed since the last one that did not."""


def _note_end(save: Future[T]) -> None:
    assert isinstance(save, BackgroundSave)
    if save.failure() is None:
        _failed.clear()
    else:
        _failed.append(save)


@fail_at_end
def _is_save_lost() -> bool:
    return not all(save.was_raised for save in _failed)


_THREADS: WeakKeyDictionary[dist.ProcessGroup, SavingThread] = WeakKeyDictionary()
_alone: list[SavingThread] = []
"""That of a process without a group."""
os.register_at_fork(after_in_child=_failed.clear)
atexit.register(_THREADS.clear)  # a group of gloo that outlives the interpreter aborts the process


def thread_of(group: Group) -> SavingThread:
    """The thread of a group. Called by every rank of the group; the first time it makes a group of the same ranks."""
    if not dist.is_initialized():
        if not _alone:
            _alone.append(SavingThread(None))
        return _alone[0]
    users = dist.group.WORLD if group is None else group
    assert users is not None
    if users not in _THREADS:
        name = gather_from(lambda: f"saves {uuid4().hex}", users, "saving in the background")[0]
        # A rank that is lost just now is waited for as long as the program wants, and not for torch's half an hour.
        timeout = timeout_of(users) or dist.constants.default_pg_timeout
        store = dist.PrefixStore(name, store_of(users))
        own, _ = make_group(users.size(), users.rank(), [], "gloo", store, group_name=name, timeout=timeout)
        keep_apart(own, dist.get_process_group_ranks(users))
        _THREADS[users] = SavingThread(own)
    return _THREADS[users]
