"""Background saves of plain states: on a thread, in a process group of their own.

Once the values are copied, what is left of a save is what it always is: write, agree on the index, commit. A thread of
each rank does it, and its collectives go through a gloo group of the same ranks, made for this alone. So the program
may use its own group meanwhile, and nothing waits for a call of the program: the checkpoint is there as soon as all
ranks have written. There is one thread for each group, so saves end in the order in which they began, on every rank.

The end of the program waits for them, a fork of it does not (`remesh.foundation.threads`). A group that is destroyed
takes its thread's group with it: saves that are still under way fail. A save that fails is logged as well,
since its program may never ask.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from remesh.checkpoint.background.staging import StagingBuffers
from remesh.comm.agreement import Agreements
from remesh.comm.gather import Group
from remesh.foundation.errors import PeerError
from remesh.foundation.thread_pool import PooledExecutor
from remesh.foundation.torch_private import all_groups, timeout_of

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
        """Let the thread do something, after all that it was given before."""
        future = BackgroundSave[T]()
        self._executor.put(future, partial(self._do, act))
        self._under_way.append(future)  # type: ignore[arg-type]
        return future

    def _do(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except BaseException as raised:
            if self.group is None or (dist.is_initialized() and self.group in all_groups()):
                logger.error("in the background: %s", raised)
                raise
            lost = PeerError(
                "saving in the background: expected the process group to last until the save is done, found it "
                "destroyed; the checkpoint does not exist; wait for result() of the last save, or for "
                "Checkpoints.wait(), before destroy_process_group()"
            )
            logger.error("%s", lost)
            raise lost from raised


_THREADS: WeakKeyDictionary[dist.ProcessGroup, SavingThread] = WeakKeyDictionary()
_alone: list[SavingThread] = []
"""That of a process without a group."""


def thread_of(group: Group) -> SavingThread:
    """The thread of a group. Called by every rank of the group; the first time it makes a group of the same ranks."""
    if not dist.is_initialized():
        if not _alone:
            _alone.append(SavingThread(None))
        return _alone[0]
    users = dist.group.WORLD if group is None else group
    assert users is not None
    if users not in _THREADS:
        ranks = dist.get_process_group_ranks(users)
        # A rank that is lost just now is waited for as long as the program wants, and not for torch's half an hour.
        own = dist.new_group(ranks, timeout_of(users), backend="gloo", use_local_synchronization=True)
        _THREADS[users] = SavingThread(own)
    return _THREADS[users]
