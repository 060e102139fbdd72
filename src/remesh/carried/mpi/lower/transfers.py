"""Point to point: what is asked of messages besides sends and receives, and what a checkpoint does to them.

A payload of at most EAGER_BYTES travels with its header, and its send is complete at once. A longer one, and every
synchronous send, is announced; the receiver asks for it when a receive *matches*, and it streams in pieces from buffer
to buffer. So only headers are ever between two ranks at a checkpoint, and a synchronous send is never completed by one.

    sender    ANNOUNCED ────────────>  matches a receive
              stream   <────────────  WANTED (tag of the stream)
              piece, piece, ... ─────>  written to the receiver's buffer, or kept until it asks

Between ranks of one host whose network is its memory, the announcement also says where the payload is. The receiver
then reads it there, and tells the sender that it has:

    sender    ANNOUNCED ────────────>  matches a receive, reads the sender's memory
              complete <────────────  TAKEN

If the sender's program waits for that, its lower half has nothing else to do and is asked, by a WANTED that says where,
to carry the second half, and says HELPED: two cores copy faster than one. On other networks PIECE_BYTES are sent ahead,
before they are wanted; what is then WANTED is the rest. The engine does all of this (``_engine_calls.c``,
``_engine_carry.c``, ``_engine_streams.c``).

While closed no payload is asked for: the open handshake is ``owed``, and part of the saved state. What has come ahead
of a message that no receive has is declined, taken from MPI and thrown away, and the message is as any that is
announced:

    sender    forgets what is ahead  <────  DECLINED
              GIVEN_UP ─────────────>  takes it from MPI, and throws it away
"""

from __future__ import annotations

from typing import Any

from remesh.carried.mpi.calls.table import ANY
from remesh.carried.mpi.lower.matching import Matching
from remesh.carried.mpi.lower.numbered import Numbered
from remesh.carried.mpi.lower.requests import RECEIVE, Requests


class MessageTransfers:
    """The point-to-point side of a rank."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self.engine: Any = None
        self.matching = Matching(Numbered)
        self.messages: dict[int, Any] = {}
        """Messages that a matched probe took out of the queue, by message number."""
        self.next_message = 1
        self.owed: list[tuple[Any, Any]] = []
        """Receives with matched announcements whose payload has not been asked for; the engine adds to them."""

    def take(self, comm: int, source: int, tag: int) -> tuple[Any, int]:
        """Take the message that a receive would get out of the queue; returns it, and the number it is kept under."""
        message = self.matching.take(comm, source, tag)
        if message is None:
            raise ValueError(f"a matched probe of communicator {comm}, source {source}, tag {tag}: no message fits")
        number, self.next_message = self.next_message, self.next_message + 1
        self.messages[number] = message
        return message, number

    def receive_message(self, number: int, capacity: int, address: int) -> Any:
        """Receive a message that a matched probe has taken; returns the request, None if no message has this number."""
        message = self.messages.pop(number, None)
        if message is None:
            return None
        request = self._requests.start(
            kind=RECEIVE, comm=message.comm, peer=ANY, tag=ANY, address=address, num_bytes=capacity
        )
        self.engine.match(request, message)
        return request

    def cancel(self, number: int) -> bool:
        """Cancel a receive that no message has come for; returns whether it was. Sends are never cancelled."""
        request = self._requests.by_number.get(number)
        if request is None or not self.matching.withdraw(number):
            return False
        request.cancelled = True
        self._requests.complete(request)
        return True

    def decline_ahead(self) -> None:
        """Give back the data that came ahead of messages that no receive has; all ranks are closed."""
        for message in self._with_ahead():
            self.engine.decline(message)

    def discard_ahead(self) -> None:
        """Discard the data that came ahead; all ranks are about to leave."""
        for message in self._with_ahead():
            self.engine.discard(message)

    def _with_ahead(self) -> list[Any]:
        return [message for message in (*self.matching.arrived, *self.messages.values()) if message.ahead]

    def ask_for_owed(self) -> None:
        """Ask for the payloads that were matched while closed."""
        owed = list(self.owed)
        self.owed.clear()
        for request, message in owed:
            self.engine.match(request, message)
