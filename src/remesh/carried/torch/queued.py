"""Works of a group over NCCL: operations that the device has queued.

A wait orders what the caller queues later behind them.

So an operation has not ended because a thread has waited for it: that call returns at once. The device knows what has
ended. A cut waits for that, but for messages that the program has not waited for: those end with their communicator,
and are posted again.

Calls within a coalescing block are kept until it ends, and are made then, all at once: no cut finds a block half made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import ProcessGroup, Work

from remesh.carried.torch.anew import Rule
from remesh.carried.torch.works import Call, Collective, MessageWork
from remesh.foundation.errors import ConfigError

_NO_TIMEOUT: Final = timedelta(0)
BLOCK: Final = "_end_coalescing"
"""The name of a block of collectives, among those of the methods that are collectives."""


@dataclass(frozen=True, slots=True)
class BlockMessage:
    """A message of a block that has not ended yet: the arguments of its call."""

    tensors: list[torch.Tensor]
    peer: int
    tag: int
    is_send: bool

    def post(self, real: ProcessGroup) -> Any:
        """Hand it to the real group."""
        return (real.send if self.is_send else real.recv)(self.tensors, self.peer, self.tag)


@dataclass(slots=True)
class CoalescingBlock:
    """The calls of a coalescing block, in their order."""

    device: torch.device
    calls: list[Call] = field(default_factory=list)
    messages: list[BlockMessage] = field(default_factory=list)

    def check(self, key: str) -> None:
        """Raise `ConfigError` when it has both kinds: they are counted apart, and a cut could part them."""
        if self.calls and self.messages:
            raise ConfigError(
                f"ending a coalescing block of group {key}: it has {len(self.calls)} collectives and "
                f"{len(self.messages)} messages, expected one kind; make a block of each"
            )


def run_in_block(real: ProcessGroup, device: torch.device, calls: Sequence[Callable[[], object]]) -> Any:
    """Make calls of a real group in a block of its own; returns the work of all of them."""
    real._start_coalescing(device)
    try:
        for call in calls:
            call()
    except BaseException:
        # A block that stays open would swallow, without a word, what this thread queues later.
        real._end_coalescing(device)
        raise
    return real._end_coalescing(device)


class QueuedCollective(Collective):
    """A collective that a device has queued, or a block of them. None can begin anew: all have to end before a cut."""

    def begin(self, real: ProcessGroup, rule: Rule, rank: int) -> bool:
        assert self._call is not None
        name, args, _ = self._call
        with self._turn:
            if name == BLOCK:
                block: CoalescingBlock = args[0]
                calls = [_asking_for_work(real, call) for call in block.calls]
                self._inner = run_in_block(real, block.device, calls)
            else:
                self._inner = _asking_for_work(real, self._call)()
            self.is_inside, self._call = False, None
            if self._inner is None:  # there was nothing to do
                self._be_over()
            elif not self._has_work:
                self._inner.wait()
        return not self._has_work

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        inner = self._inner
        if inner is not None:
            inner.wait(timeout) if timeout else inner.wait()
        return True

    def wait_aside(self) -> None:
        """Do nothing: the device goes on by itself."""

    def _end(self, timeout: timedelta) -> None:
        inner = self._inner
        if inner is not None and inner.is_completed():
            if self._has_work:
                self._keep_future_of(inner)
            self._be_over()


def _asking_for_work(real: ProcessGroup, call: Call) -> Callable[[], Any]:
    """A call that gives a work. torch gives none for one that waits itself, and then its end cannot be seen."""
    name, args, options = call
    if args and hasattr(args[-1], "asyncOp"):
        args[-1].asyncOp = True
    return lambda: getattr(real, name)(*args, **options)


class QueuedMessage(MessageWork):
    """A message that a device has queued."""

    is_ordered = False
    """Whether the program has waited for it: what it has queued since needs its end."""

    @property
    def has_to_end(self) -> bool:
        return self.is_ordered and not self.settle()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        self._gate.begin_passing()  # after a cut there is another work
        try:
            self.is_ordered = True
            if (inner := self._inner) is not None:
                inner.wait(timeout) if timeout else inner.wait()
        finally:
            self._gate.end_passing()
        return True

    def wait_aside(self) -> None:
        self.settle()

    def settle(self) -> bool:
        """Whether it has ended; does not wait."""
        if self._inner is not None and self._turn.acquire(blocking=False):
            try:
                self._end(_NO_TIMEOUT)
            finally:
                self._turn.release()
        return self.has_ended

    def _end(self, timeout: timedelta) -> None:
        inner = self._inner
        if inner is not None and inner.is_completed():
            self.has_ended, self._inner = True, None
            self._on_ended(self)

    def is_completed(self) -> bool:
        return self.settle()

    def is_success(self) -> bool:
        return self.settle()


class MessagesWork(Work):
    """What the program gets for a block of messages."""

    def __init__(self, works: Sequence[MessageWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        for each in self._works:
            each.wait(timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(each.is_completed() for each in self._works)

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> Any:
        return None
