"""What the engine does, said as simply as can be: matching, and the locks of windows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from remesh.carried.mpi.calls.table import ANY
from remesh.carried.mpi.lower.exposure import Asker


@dataclass
class DumbMatching:
    """MPI's rule: the oldest that fits, of receives and of messages."""

    posted: list[Any] = field(default_factory=list)
    arrived: list[Any] = field(default_factory=list)

    def post(self, receive: Any) -> Any:
        """The message that it takes, or None."""
        return _take(self.arrived, lambda message: _fit(receive, message)) or self.posted.append(receive)

    def arrive(self, message: Any) -> Any:
        """The receive that takes it, or None."""
        return _take(self.posted, lambda receive: _fit(receive, message)) or self.arrived.append(message)

    def find(self, receive: Any) -> Any:
        """The message that it would take, or None; it stays."""
        return next((message for message in self.arrived if _fit(receive, message)), None)


def _take(queue: list[Any], fits: Any) -> Any:
    found = next((one for one in queue if fits(one)), None)
    if found is not None:
        queue.remove(found)
    return found


def _fit(receive: Any, message: Any) -> bool:
    return (
        receive.comm == message.comm and receive.source in (ANY, message.source) and receive.tag in (ANY, message.tag)
    )


@dataclass
class DumbLock:
    """Who holds the lock of a window on one rank, and who waits, in order of arrival."""

    holders: list[Asker] = field(default_factory=list)
    waiting: list[Asker] = field(default_factory=list)

    def ask(self, asker: Asker) -> list[Asker]:
        """Someone wants it; who has got it by that."""
        self.waiting.append(asker)
        return self._grant()

    def release(self, rank: int) -> list[Asker]:
        """A holder gives it back; who has got it by that."""
        self.holders = [holder for holder in self.holders if holder.rank != rank]
        return self._grant()

    def _grant(self) -> list[Asker]:
        granted: list[Asker] = []
        while self.waiting and (
            not self.holders or not (self.waiting[0].exclusive or any(holder.exclusive for holder in self.holders))
        ):
            granted.append(self.waiting.pop(0))
            self.holders.append(granted[-1])
        return granted
