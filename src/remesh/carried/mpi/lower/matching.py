"""Queues of message matching: posted receives, and messages that arrived before their receive.

MPI's rule: a message that arrives goes to the *oldest* posted receive that fits it; a receive that is posted takes the
*earliest arrived* message that fits it. Communicator, source and tag must be equal, or the receive says ANY for the
latter two. The engine matches (``_engine_queues.c``), on these queues; here is what else is asked of them.

Both are kept per communicator, in order of arrival and of posting. Source: MPI 4.1, section 3.5.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from remesh.carried.mpi.calls.table import ANY


class Matching:
    """The two queues of one rank, by communicator."""

    def __init__(self, make_table: Callable[[], MutableMapping[int, list[Any]]] = dict) -> None:
        self.posted_by_comm, self.arrived_by_comm = make_table(), make_table()

    def find(self, comm: int, source: int, tag: int) -> Any:
        """Return the message that such a receive would take, or None; it stays."""
        for message in self.arrived_by_comm.get(comm, ()):
            if source in (ANY, message.source) and tag in (ANY, message.tag):
                return message
        return None

    def take(self, comm: int, source: int, tag: int) -> Any:
        """Return that message and remove it."""
        message = self.find(comm, source, tag)
        if message is not None:
            arrived = self.arrived_by_comm[comm]
            del arrived[next(index for index, one in enumerate(arrived) if one is message)]
        return message

    def withdraw(self, request: int) -> bool:
        """Take back a posted receive; False if a message has taken it already."""
        for waiting in self.posted_by_comm.values():
            for index, receive in enumerate(waiting):
                if receive.request == request:
                    del waiting[index]
                    return True
        return False

    def fill(self, posted: list[Any], arrived: list[Any]) -> None:
        """Put both queues back in their order; none of these messages fits any of these receives."""
        for receive in posted:
            self.posted_by_comm.setdefault(receive.comm, []).append(receive)
        for message in arrived:
            self.arrived_by_comm.setdefault(message.comm, []).append(message)

    @property
    def posted(self) -> list[Any]:
        """All posted receives; those of one communicator in order."""
        return [receive for waiting in self.posted_by_comm.values() for receive in waiting]

    @property
    def arrived(self) -> list[Any]:
        """All messages that wait; those of one communicator in order."""
        return [message for waiting in self.arrived_by_comm.values() for message in waiting]
