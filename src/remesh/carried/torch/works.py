"""Works of a process group in a program, which drop the real work as soon as it has ended.

A work of gloo keeps its group's connections, so the real one is dropped as soon as it has ended. Some end only once
some thread waits for them (gloo's reduce-scatter), and to wait twice would copy the result twice. So the thread that
waits holds a lock, and during a round a thread of Remesh waits for what no other thread waits for.

What small calls cost is felt, so a collective that its call waits for makes no work at all; and where there is the
extension in C, it is no `Collective` before a round asks for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, cast

import torch
from torch.distributed import ProcessGroup, Work

from remesh.carried.torch.anew import Kept, Rule, has_inference_tensor, restore
from remesh.carried.torch.gate import Entrant, Gate, Tally
from remesh.carried.torch.short import SHORT
from remesh.foundation.threads import make_thread

_NO_TIMEOUT = timedelta(0)
"""The value by which torch means that no timeout was given."""


Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A call of the real group: the method's name and its arguments."""


class _UnderWay:
    """What the real group was given, the real work for it, which comes and goes, and the lock of its waiter."""

    _gate: Gate
    _turn: threading.Lock
    _inner: Work | None = None
    """None before it has begun, once it has ended, and while it is cut off."""

    @property
    def is_waited_for(self) -> bool:
        """Whether some thread waits for the end."""
        return self._turn.locked()

    def _end_in_turn(self, timeout: timedelta) -> None:
        """`_end` it. `RuntimeError`, as torch's, if another thread waits for longer than the timeout."""
        if self._turn.acquire(timeout=max(timeout.total_seconds(), 0.0) if timeout else -1):
            try:
                self._end(timeout)
            finally:
                self._turn.release()
        elif not self._gate.is_closed:
            raise RuntimeError("Operation timed out!")

    def let_go(self, limit_s: float) -> bool:
        """Forget the real work, whose connections are cut; False if a thread still waits for it after the limit."""
        if not self._turn.acquire(timeout=limit_s):
            return False
        self._inner = None
        self._turn.release()
        return True

    def wait_aside(self) -> None:
        """Have a thread of Remesh wait for the end, unless another thread does."""
        if not self.is_over and not self.is_waited_for:
            with contextlib.suppress(RuntimeError):  # Python is about to end, and starts no thread: so is the program
                make_thread("work", self._wait_quietly, daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether no thread has to wait."""
        raise NotImplementedError

    def _wait_quietly(self) -> None:
        raise NotImplementedError

    def _end(self, timeout: timedelta) -> None:
        raise NotImplementedError


class Collective(_UnderWay, Entrant):
    """A collective of the program, from its call until it has ended.

    One that can begin anew may be cut off, with its group: a thread that waits for it then waits until it has begun and
    ended in the next group.
    """

    # What few ever set stands here once: each small collective makes one of these.
    is_over = False
    """Whether it has ended: the real work and its tensors are let go of."""
    _kept: Kept | None = None
    _future: torch.futures.Future[Any] | None = None
    _is_future_ours = False
    _error: RuntimeError | None = None
    _short: Any = None
    """What stands for it in its tally, if it began on the short way."""

    def __init__(self, gate: Gate, tally: Tally, call: Call, has_work: bool) -> None:
        """With ``has_work`` the program gets a work for it, and may ask for its future; else its call waits."""
        self._gate, self._tally, self._turn = gate, tally, threading.Lock()
        self._call: Call | None = call
        self._has_work = has_work

    @property
    def can_begin_anew(self) -> bool:
        return self._kept is not None

    def begin(self, real: ProcessGroup, rule: Rule, rank: int) -> bool:
        """Hand it to the real group, wait if the program gets no work, and return whether it has ended well.

        ``rule`` decides what is kept to begin anew, on this rank of the group. What the real group refuses is raised.
        """
        assert self._call is not None
        name, args, options = self._call
        with self._turn:
            self._kept = rule(args, options, rank)
            self._inner = getattr(real, name)(*args, **options)
            self.is_inside = False
            if self._has_work:
                return False
            self._end(_NO_TIMEOUT)
            return self.is_over and self._error is None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        while True:
            self._end_in_turn(timeout)
            if self.is_over:
                break
            self._gate.wait_until_open()
        if self._error is not None:
            raise self._error
        return True

    def settle(self) -> bool:
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
        with contextlib.suppress(RuntimeError):  # its waiters in the program get the error
            self.wait()

    def _end(self, timeout: timedelta) -> None:
        """Wait for the real work and let go of it. One that is cut off is left as it is. The caller holds the lock."""
        inner = self._inner
        if inner is None:
            return
        try:
            inner.wait(timeout) if timeout else inner.wait()
        except RuntimeError as error:
            if not timeout or inner.is_completed():
                self._hear(error)
            elif not self._gate.is_closed:
                # It goes on, and may be waited for again: only this wait is over.
                raise
        else:
            if self._has_work:
                self._keep_future_of(inner)
            self._be_over()

    def _hear(self, error: RuntimeError) -> None:
        # What can begin anew ends on no rank once all gates are closed, and none opens before all have let go.
        if not (self.can_begin_anew and self._gate.is_closed):
            self._fail(error)

    def _keep_future_of(self, inner: Work) -> None:
        found = _future_of(inner)
        if self._future is None:
            self._future = found
        elif self._is_future_ours:
            self._future.set_result(None if found is None else found.value())

    def _fail(self, error: RuntimeError) -> None:
        self._error = error
        if self._future is not None and self._is_future_ours:
            self._future.set_exception(error)
        self._be_over()

    def _be_over(self) -> None:
        """Mark it as over, and keep neither the real work nor its tensors."""
        self.is_over, self._inner, self._call, self._kept = True, None, None, None
        self._tally.under_way.pop(self if self._short is None else self._short, None)
        self._short = None

    # --- the short way ---

    @classmethod
    def heir_of(cls, short: Any, gate: Gate, tally: Tally) -> Collective:
        """What goes on in place of a collective on the short way, whose thread waits and has the turn."""
        heir = cls(gate, tally, (short.name, short.arguments, {}), has_work=False)
        heir.number, heir.is_inside, heir._short = short.number, False, short
        heir._kept, heir._inner = short.kept, short.inner
        heir._turn.acquire()
        return heir

    def outlast(self, error: RuntimeError | None) -> None:
        """Hear from the thread that has waited on the short way how the wait has ended, and take the turn from it."""
        if error is None:
            self._be_over()
        else:
            self._hear(error)
        self._turn.release()

    # --- a cut ---

    def begin_anew(self, real: ProcessGroup) -> None:
        """Hand it to the real group that was grown again. The gate is closed, so no thread waits for it."""
        assert self._kept is not None
        assert self._call is not None
        name, args, options = self._call
        # The real group works on the tensors in the mode of the thread that calls it.
        with torch.inference_mode(has_inference_tensor(args)):
            restore(self._kept)
            self._inner = getattr(real, name)(*args, **options)

    def break_off(self, why: str) -> None:
        """Make it fail: it cannot end any more, since a member has left its group."""
        self._fail(RuntimeError(why))

    # --- what a work is asked ---

    def error(self) -> RuntimeError | None:
        """Why it failed; None if it has not."""
        self.settle()
        return self._error

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._find_future()
        if self._future is None:
            raise RuntimeError("asking a work for its future: works of this collective have none")
        return self._future

    def _find_future(self) -> None:
        # A holder of the real work's future learns its end from that, so from now on a cut waits for it. In a round
        # that comes too late: then there is a future of this object's.
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


def is_short(entrant: object) -> bool:
    """Whether it began on the short way."""
    return SHORT is not None and isinstance(entrant, SHORT.Waiting)


def see_under_way(gate: Gate, tally: Tally) -> list[Entrant]:
    """What is under way, in its order, for the thread that prepares a cut; what is on the short way gets an heir."""
    found = (_see_short(each, gate, tally) if is_short(each) else each for each in list(tally.under_way))
    return [each for each in found if each is not None]


def _see_short(short: Any, gate: Gate, tally: Tally) -> Entrant | None:
    if short.heir is not None:
        return cast(Collective, short.heir)
    if short.inner is None:
        inside = Entrant()
        inside.number = short.number
        return inside
    heir = Collective.heir_of(short, gate, tally)
    return heir if short.name_heir(heir) else None


class CollectiveWork(Work):
    """What the program holds of a collective, until it lets go of it."""

    def __init__(self, collective: Collective) -> None:
        super().__init__()
        self._collective = collective

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return self._collective.wait(timeout)

    def synchronize(self) -> None:
        self._collective.wait()

    def is_completed(self) -> bool:
        return self._collective.settle()

    def is_success(self) -> bool:
        return self._collective.settle() and self._collective.error() is None

    def exception(self) -> Any:
        return self._collective.error()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._collective.get_future()

    def result(self) -> Any:
        return self._collective.result()


class _EndedWork(Work):
    """What a call gives that has waited for its collective: there is nothing left to ask."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


if SHORT is not None:
    # Each call that waits asks for this.
    _EndedWork.wait = SHORT.Yes()  # type: ignore[method-assign]

ENDED: Final = _EndedWork()


def _future_of(inner: Work) -> torch.futures.Future[Any] | None:
    try:
        return inner.get_future()
    except RuntimeError:  # works of gloo's reduce-scatter have none
        return None


class MessageWork(_UnderWay, Work):
    """A message that was posted: to be sent, or to be received. gloo moves it once both ends have been posted.

    Its end is *counted* when a thread sees it, and *reported* to the program once the gate is open: until then the
    message can be posted again, since the program may not touch its tensor. So a message that was on its way at the cut
    is not lost.
    """

    def __init__(
        self, gate: Gate, post: Callable[[], Work], on_ended: Callable[[MessageWork], None], *, is_send: bool
    ) -> None:
        """``post`` hands the message to the real group, now and again after a cut; ``on_ended`` counts it."""
        inner = post()  # before anything else: other ranks wait for it
        Work.__init__(self)
        self._gate, self._turn, self._inner = gate, threading.Lock(), inner
        self.is_send = is_send
        self._post = post
        self._on_ended = on_ended
        self.has_ended = False
        """Whether its end has been counted; a cut may take that back for a message to be sent."""
        self.source = -1
        """Rank in its group from which it came, for a receive that has ended."""

    @property
    def has_to_end(self) -> bool:
        """Whether a cut waits for its end."""
        return False

    def post_again(self, inner: Work | None = None) -> None:
        """Hand the message to the group that was grown again; ``inner`` is the work of a block that has done so."""
        self._inner, self.has_ended = inner or self._post(), False

    def settle(self) -> bool:
        """Whether it has ended; does not wait."""
        return self.has_ended

    @property
    def is_over(self) -> bool:
        return self._inner is None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        while True:
            self._end_in_turn(timeout)
            self._gate.wait_until_open()
            if self.has_ended:
                return True

    def _wait_quietly(self) -> None:
        with self._turn:
            self._end(_NO_TIMEOUT)

    def _end(self, timeout: timedelta) -> None:
        """Wait for the real work, and count it. One that is cut off is left as it is. The caller holds the lock."""
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

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.has_ended

    def is_success(self) -> bool:
        return self.has_ended

    def exception(self) -> Any:
        return None

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank
