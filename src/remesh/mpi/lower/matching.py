"""Which message goes to which receive?

MPI's rule: a message that arrives goes to the *oldest* posted receive that fits it; a receive that is posted takes the
*earliest arrived* message that fits it. Communicator, source and tag must be equal, or the receive says ANY for the
latter two. Messages between two ranks arrive in the order in which they were sent (the wire keeps it), so they match in
that order too. A blocking receive is a posted one.

Both queues are kept per communicator, in order of arrival and of posting. Source: MPI 4.1, section 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass

from remesh.mpi.calls.table import ANY


@dataclass(slots=True)
class Arrived:
    """A message, or the announcement of one, that no receive has taken."""

    comm: int
    source: int  # world rank
    tag: int
    num_bytes: int  # of the message
    payload: bytes | None  # None: announced only; the sender still has it
    sender_request: int  # at the sender, when announced; else 0
    # Where the payload is that was announced; good only as long as this stay.
    pid: int = 0  # as all ranks of this host see it; 0 for a rank elsewhere
    address: int = 0
    waits: bool = False  # the sender's program does nothing else meanwhile
    ahead: int = 0  # tag of the stream with its first bytes, which are on their way; 0: nothing is
    ahead_piece: int = 0  # bytes of each piece of that


@dataclass(slots=True)
class Posted:
    """A receive that no message has come for."""

    request: int
    comm: int
    source: int  # world rank or ANY
    tag: int  # or ANY


def fits(receive_source: int, receive_tag: int, message: Arrived) -> bool:
    """Whether a receive for this source and tag takes the message (the communicators being equal)."""
    return receive_source in (ANY, message.source) and receive_tag in (ANY, message.tag)


class Matching:
    """The two queues of one rank."""

    def __init__(self) -> None:
        self._posted: dict[int, list[Posted]] = {}
        self._arrived: dict[int, list[Arrived]] = {}

    @property
    def queues(self) -> tuple[dict[int, list[Posted]], dict[int, list[Arrived]]]:
        """Receives and messages that wait, by communicator: the engine works on them, too."""
        return self._posted, self._arrived

    def arrive(self, message: Arrived) -> Posted | None:
        """The receive that takes the message, removed; or None, and the message waits."""
        waiting = self._posted.get(message.comm)
        if waiting:
            for index, receive in enumerate(waiting):
                if fits(receive.source, receive.tag, message):
                    return waiting.pop(index)
        self._arrived.setdefault(message.comm, []).append(message)
        return None

    def post(self, receive: Posted) -> Arrived | None:
        """The message that the receive takes, removed; or None, and the receive waits."""
        message = self.take(receive.comm, receive.source, receive.tag)
        if message is None:
            self._posted.setdefault(receive.comm, []).append(receive)
        return message

    def find(self, comm: int, source: int, tag: int) -> Arrived | None:
        """The message that such a receive would take; it stays."""
        return next((m for m in self._arrived.get(comm, ()) if fits(source, tag, m)), None)

    def take(self, comm: int, source: int, tag: int) -> Arrived | None:
        """The message that such a receive would take, removed."""
        arrived = self._arrived.get(comm)
        if arrived:
            for index, message in enumerate(arrived):
                if fits(source, tag, message):
                    return arrived.pop(index)
        return None

    def withdraw(self, request: int) -> bool:
        """Take back a posted receive; False if a message has taken it already."""
        for waiting in self._posted.values():
            for index, receive in enumerate(waiting):
                if receive.request == request:
                    del waiting[index]
                    return True
        return False

    @property
    def posted(self) -> list[Posted]:
        """All posted receives; those of one communicator in order."""
        return [receive for waiting in self._posted.values() for receive in waiting]

    @property
    def arrived(self) -> list[Arrived]:
        """All messages that wait; those of one communicator in order."""
        return [message for waiting in self._arrived.values() for message in waiting]
