"""What does a program hold while a collective or message is under way? A work of Remesh, which lets go of the real one.

A work of gloo keeps its group's connections, so the real one is dropped as soon as it has ended. Some end only once
some thread waits for them (gloo's reduce-scatter), and to wait twice would copy the result twice. So the thread that
waits holds the work's turn, and during a round a thread of Remesh waits for the works that no other thread waits for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from remesh.torch_programs.anew import Kept, restore
from remesh.torch_programs.gate import Gate

_NO_TIMEOUT = timedelta(0)
"""The value by which torch says that no timeout was given."""


class _HeldWork(Work):
    """The real work beneath a carried one, which comes and goes, and whose turn it is to wait for it."""

    def __init__(self, gate: Gate, post: Callable[[], Work]) -> None:
        """``post`` hands the work to the real group."""
        inner = post()  # before anything else: other ranks wait for it
        super().__init__()
        self._gate = gate
        self._turn = threading.Lock()
        self._inner: Work | None = inner
        """None once this work has ended, and while it is cut off."""

    @property
    def is_waited_for(self) -> bool:
        """Whether some thread waits for the work's end."""
        return self._turn.locked()

    def let_go(self, limit_s: float) -> bool:
        """Forget the real work, whose connections are cut; False if a thread still waits for it after the limit."""
        if not self._turn.acquire(timeout=limit_s):
            return False
        self._inner = None
        self._turn.release()
        return True

    def wait_aside(self) -> None:
        """Have a thread of Remesh wait for the work, unless another thread does."""
        if not self.is_over and not self.is_waited_for:
            threading.Thread(target=self._wait_quietly, name="remesh-work", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether no thread has to wait for the work."""
        raise NotImplementedError

    def _wait_quietly(self) -> None:
        raise NotImplementedError

    def synchronize(self) -> None:
        self.wait()


class CollectiveWork(_HeldWork):
    """A collective that was entered.

    One that can begin anew may be cut off, with its group: a thread that waits for it then waits until it has begun and
    ended in the next group.
    """

    # What few works ever set stands here once: each small collective makes a work.
    is_over = False
    """Whether it has ended: the real work and its tensors are let go of."""
    _future: torch.futures.Future[Any] | None = None
    _is_future_ours = False
    _error: RuntimeError | None = None

    def __init__(self, gate: Gate, number: int, post: Callable[[], Work], kept: Kept | None) -> None:
        """``post`` hands the work to the real group, now and, if ``kept`` says that it can begin anew, after a cut."""
        super().__init__(gate, post)
        self.number = number
        """The collective's number in its group, from 1 on."""
        self._post: Callable[[], Work] | None = post
        self._kept = kept

    @property
    def can_begin_anew(self) -> bool:
        """Whether a cut need not wait for its end."""
        return self._kept is not None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        while True:
            with self._turn:
                self._end(timeout)
            if self.is_over:
                break
            self._gate.wait_until_open()
        if self._error is not None:
            raise self._error
        return True

    def settle(self) -> bool:
        """Whether the collective has ended; does not wait."""
        inner = self._inner
        if inner is None:
            return self.is_over
        if inner.is_completed() and self._turn.acquire(blocking=False):
            try:
                self._end(_NO_TIMEOUT)
            finally:
                self._turn.release()
        return self.is_over

    def _wait_quietly(self) -> None:
        with contextlib.suppress(RuntimeError):  # who waits for it in the program is told
            self.wait()

    def _end(self, timeout: timedelta) -> None:
        """Wait for the real work and let go of it. One that is cut off is left as it is. The turn is held."""
        inner = self._inner
        if inner is None:
            return
        try:
            inner.wait(timeout) if timeout else inner.wait()
        except RuntimeError as error:
            # What can begin anew ends on nobody once all gates are closed, and none opens before all have let go.
            if self.can_begin_anew and self._gate.is_closed:
                return
            self._fail(error)
        else:
            found = _future_of(inner)
            if self._future is None:
                self._future = found
            elif self._is_future_ours:
                self._future.set_result(None if found is None else found.value())
            self._be_over()

    def _fail(self, error: RuntimeError) -> None:
        self._error = error
        if self._future is not None and self._is_future_ours:
            self._future.set_exception(error)
        self._be_over()

    def _be_over(self) -> None:
        """Mark the work as over, and keep neither the real work nor its tensors."""
        self.is_over, self._inner, self._post, self._kept = True, None, None, None

    # --- a cut ---

    def begin_anew(self) -> None:
        """Hand the collective to the group that was grown again. The gate is closed, so no thread waits for it."""
        assert self._kept is not None
        assert self._post is not None
        restore(self._kept)
        self._inner = self._post()

    def break_off(self, why: str) -> None:
        """Make the work fail: it cannot end any more, since a member has left its group."""
        self._fail(RuntimeError(why))

    # --- what a work is asked ---

    def is_completed(self) -> bool:
        return self.settle()

    def is_success(self) -> bool:
        return self.settle() and self._error is None

    def exception(self) -> Any:
        self.settle()
        return self._error

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._find_future()
        if self._future is None:
            raise RuntimeError("asking a work for its future: works of this collective have none")
        return self._future

    def _find_future(self) -> None:
        # Who has the future of the real work is told by it, so from now on a cut waits for its end. In a round that
        # comes too late: then there is one of ours.
        with self._gate.changed:
            if self._gate.is_open or not self.can_begin_anew:
                self._future = None if self._inner is None else _future_of(self._inner)
                self._kept = None if self._future is not None else self._kept
                return
            self._future, self._is_future_ours = torch.futures.Future(), True
        self.wait_aside()

    def result(self) -> Any:
        inner = self._inner
        return self.get_future().value() if inner is None else inner.result()


def _future_of(inner: Work) -> torch.futures.Future[Any] | None:
    try:
        return inner.get_future()
    except RuntimeError:  # works of gloo's reduce-scatter have none
        return None


class MessageWork(_HeldWork):
    """A message that was posted: to be sent, or to be received. gloo moves it once both ends have been posted.

    Its end is *counted* when a thread sees it, and *told* to the program once the gate is open: until then the message
    can be posted again, since the program may not touch its tensor. So a message that was on its way at the cut is
    not lost.
    """

    def __init__(
        self, gate: Gate, post: Callable[[], Work], on_ended: Callable[[MessageWork], None], *, is_send: bool
    ) -> None:
        """``post`` hands the message to the real group, now and again after a cut; ``on_ended`` counts it."""
        super().__init__(gate, post)
        self.is_send = is_send
        self._post = post
        self._on_ended = on_ended
        self.has_ended = False
        """Whether its end has been counted; a cut may take that back for a message to be sent."""
        self.source = -1
        """Rank in its group from which it came, for a receive that has ended."""

    def post_again(self) -> None:
        """Hand the message to the group that was grown again."""
        self._inner, self.has_ended = self._post(), False

    @property
    def is_over(self) -> bool:
        return self._inner is None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        while True:
            with self._turn:
                self._end(timeout)
            self._gate.wait_until_open()
            if self.has_ended:
                return True

    def _wait_quietly(self) -> None:
        with self._turn:
            self._end(_NO_TIMEOUT)

    def _end(self, timeout: timedelta) -> None:
        """Wait for the real work, and count it. One that is cut off meanwhile is left as it is. The turn is held."""
        inner = self._inner
        if inner is None:
            return
        try:
            inner.wait(timeout) if timeout else inner.wait()
        except RuntimeError:
            # At a cut ranks break their connections one after another, which others see as errors.
            if not self._gate.is_closed:
                raise
            return
        if not self.is_send:
            self.source = inner._source_rank()
        self.has_ended, self._inner = True, None
        self._on_ended(self)

    def is_completed(self) -> bool:
        return self.has_ended

    def is_success(self) -> bool:
        return self.has_ended

    def exception(self) -> Any:
        return None

    def source_rank(self) -> int:
        return self.source

    def _source_rank(self) -> int:
        return self.source
