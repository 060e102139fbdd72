"""What is left of a background save once every rank has written? Its index and its commit, off the training loop.

    begin    every rank, on the loop's thread: agree on what has been written; a short gather where plans are remembered
    (work)   a thread of each rank that has something to do: files, fsync, renames; no other rank is called
    end      every rank, on the loop's thread: wait for the thread, then raise on all ranks what failed on one

A settling is one of the functions that finish a request: called, it does all three. A queue that knows it does them
one by one, and asks in between, so that a loop never waits for a disk.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

from remesh.comm.gather import Group, gather_from

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
        self._error: BaseException | None = None
        self._begun = False
        self._done = threading.Event()

    def add(self, work: Work) -> None:
        """Let this rank do ``work`` too, after what is there already."""
        self._after.append(work)

    def add_on_success(self, then: Work) -> None:
        """Let ``then`` run on the loop's thread, and cost nothing, once all ranks are done."""
        self._on_success.append(then)

    def begin(self) -> None:
        """Agree, and let a thread work. Called by every rank; raises on all alike."""
        work = self._agree()
        _thread.start_new_thread(self._work, (work,))  # `threading` would wait until it runs, and the loop with it
        self._begun = True

    def is_done(self) -> bool:
        """Whether this rank has nothing left to do. Calls no other rank."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return when nothing of this rank is writing any more. Calls no other rank."""
        if self._begun:
            self._done.wait()

    def __call__(self) -> None:
        """Do what is left, of all three. Called by every rank; raises on all alike."""
        if not self._begun:
            self.begin()
        gather_from(self._tell, self._group, self._doing)
        for then in self._on_success:
            then()

    def _tell(self) -> None:
        self.wait()
        if self._error is not None:
            raise self._error

    def _work(self, first: Work) -> None:
        try:
            for work in (first, *self._after):
                work()
        except BaseException as raised:  # raised on all ranks when the save is finalized
            self._error = raised
        finally:
            self._done.set()
