"""What does a program hold while a collective or a message is under way? A work of ours, which lets go of the real one.

A work of gloo keeps its group's connections, so the real one is dropped as soon as it has ended. Some end only once
somebody waits for them (gloo's reduce-scatter), and to wait twice would copy the result twice: whoever waits holds the
work's turn, and at a round a thread of ours waits for what nobody waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from remesh.torch_programs.gate import Gate

_NO_TIMEOUT = timedelta(0)
"""torch's word for none given."""


class CollectiveWork(Work):
    """A collective that was entered."""

    def __init__(self, inner: Work) -> None:
        super().__init__()
        self._inner: Work | None = inner
        self._turn = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._error: RuntimeError | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        with self._turn:
            self._end(timeout)
        if self._error is not None:
            raise self._error
        return True

    def settle(self) -> bool:
        """Whether it has ended, looked at without waiting."""
        inner = self._inner
        if inner is not None and inner.is_completed() and self._turn.acquire(blocking=False):
            try:
                self._end(_NO_TIMEOUT)
            finally:
                self._turn.release()
        return self._inner is None

    def wait_aside(self) -> None:
        """Have a thread of ours wait for it, unless somebody does."""
        if self._inner is not None and not self._turn.locked():
            threading.Thread(target=self._wait_quietly, name="remesh-work", daemon=True).start()

    def _wait_quietly(self) -> None:
        with self._turn:
            self._end(_NO_TIMEOUT)

    def _end(self, timeout: timedelta) -> None:
        """Wait for the real work and let go of it. The turn is held."""
        inner = self._inner
        if inner is None:
            return
        try:
            inner.wait(timeout) if timeout else inner.wait()
        except RuntimeError as error:
            self._error = error
        else:
            self._future = self._future or _future_of(inner)
        self._inner = None

    def is_completed(self) -> bool:
        inner = self._inner
        return inner is None or inner.is_completed()

    def is_success(self) -> bool:
        inner = self._inner
        return self._error is None if inner is None else inner.is_success()

    def exception(self) -> Any:
        inner = self._inner
        return self._error if inner is None else inner.exception()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        inner = self._inner
        if self._future is None and inner is not None:
            self._future = inner.get_future()
        if self._future is None:
            raise RuntimeError("asking a work for its future: works of this collective have none")
        return self._future

    def result(self) -> Any:
        inner = self._inner
        return self.get_future().value() if inner is None else inner.result()


def _future_of(inner: Work) -> torch.futures.Future[Any] | None:
    try:
        return inner.get_future()
    except RuntimeError:  # works of gloo's reduce-scatter have none
        return None


class MessageWork(Work):
    """A message that was posted: to be sent, or to be received. gloo moves it once both ends have been posted.

    Its end is *counted* when a thread sees it, and *told* to the program once the gate is open: until then the message
    can be posted again, since the program may not touch its tensor. So a message that the cut found on its way is lost
    by nobody.
    """

    def __init__(
        self, gate: Gate, post: Callable[[], Work], on_ended: Callable[[MessageWork], None], *, is_send: bool
    ) -> None:
        """``post`` hands the message to the real group, now and again after a cut; ``on_ended`` counts it."""
        super().__init__()
        self.is_send = is_send
        self._gate = gate
        self._post = post
        self._on_ended = on_ended
        self._turn = threading.Lock()
        self._inner: Work | None = post()
        self.has_ended = False
        """Counted; a cut may take that back from a message to be sent."""
        self.source = -1
        """Rank in its group from which it came, for a receive that has ended."""

    def post_again(self) -> None:
        """Hand it to the group that was grown again."""
        self._inner, self.has_ended = self._post(), False

    def let_go(self, limit_s: float) -> bool:
        """Forget the real work, whose connections are cut; False if somebody still waits for it after the time."""
        if not self._turn.acquire(timeout=limit_s):
            return False
        self._inner = None
        self._turn.release()
        return True

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        while True:
            with self._turn:
                self._end(timeout)
            self._gate.wait_until_open()
            if self.has_ended:
                return True

    def wait_aside(self) -> None:
        """Have a thread of ours wait for it, unless somebody does."""
        if self._inner is not None and not self._turn.locked():
            threading.Thread(target=self._wait_quietly, name="remesh-message", daemon=True).start()

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

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self.source

    def _source_rank(self) -> int:
        return self.source
