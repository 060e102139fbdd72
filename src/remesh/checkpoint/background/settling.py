"""The end of a background save, once every rank has written: its index and its commit, off the training loop.

    begin    every rank, on the loop's thread: agree on what has been written; a short gather where plans are remembered
    (work)   a thread of each rank that has something to do: files, fsync, renames; no other rank is called
    end      every rank, on the loop's thread: wait for the thread, then raise on all ranks what failed on one

A settling is one of the functions that finish a request: called, it does all three. A queue that knows it does them
one by one, and asks in between, so that a loop never waits for a disk.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait

from remesh.comm.gather import Group, gather_from
from remesh.foundation.thread_pool import PooledExecutor

Work = Callable[[], None]


class Settling:
    """The end of one save. Every rank has one and makes the same calls on it."""

    def __init__(self, agree: Callable[[], Work], group: Group, doing: str) -> None:
        self._agree = agree
        """Called by every rank; returns what this one has to do, calling no other."""
        self._group = group
        self._doing = doing
        self._after: list[Work] = []
        self._on_success: list[Work] = []
        self._executor = PooledExecutor(1, "settle")
        self._settled: Future[None] | None = None
        """None until it has begun."""

    def add(self, work: Work) -> None:
        """Let this rank do ``work`` too, after what is there already."""
        self._after.append(work)

    def add_on_success(self, then: Work) -> None:
        """Let ``then`` run on the loop's thread, and cost nothing, once all ranks are done."""
        self._on_success.append(then)

    def begin(self) -> None:
        """Agree, and let a thread work. Called by every rank; raises on all alike."""
        work = self._agree()
        self._settled = self._executor.submit(self._work, work)

    def is_done(self) -> bool:
        """Whether this rank has nothing left to do. Calls no other rank."""
        return self._settled is not None and self._settled.done()

    def wait(self) -> None:
        """Return when nothing of this rank is writing any more. Calls no other rank."""
        if self._settled is not None:
            wait([self._settled])

    def __call__(self) -> None:
        """Do what is left, of all three. Called by every rank; raises on all alike."""
        if self._settled is None:
            self.begin()
        gather_from(self._report, self._group, self._doing)
        for then in self._on_success:
            then()

    def _report(self) -> None:
        assert self._settled is not None
        self._settled.result()

    def _work(self, first: Work) -> None:
        for work in (first, *self._after):
            work()
