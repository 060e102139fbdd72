"""Point to point: sends, receives, probes, and the handshake for payloads that are too long to send unasked.

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
to carry the second half, and says HELPED: two cores copy faster than one. What stands in the arena is copied once,
anything else twice.

On other networks MPI works in place on a buffer that stands in the arena. If both do, the whole payload is one piece:
the program's message is then one message of the real MPI.

There an engine sends PIECE_BYTES ahead, before they are wanted (``_engine_streams.c``); what is then WANTED is the
rest.

While closed no payload is asked for: the open handshake is ``owed``, and part of the saved state. What has come ahead
of a message that no receive has is declined, taken from MPI and thrown away, and the message is as any that is
announced:

    sender    forgets what is ahead  <────  DECLINED
              GIVEN_UP ─────────────>  takes it from MPI, and throws it away

The engine does all of this without Python (``_engine_carry.c``, ``_engine_streams.c``), but for payloads of unknown
size, those longer than their buffer, and messages to oneself; here is the whole, for what it leaves and without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remesh.mpi.calls.table import ANY, PARCEL
from remesh.mpi.lower.collectives import Group
from remesh.mpi.lower.matching import Matching
from remesh.mpi.lower.records import Arrived, Posted
from remesh.mpi.lower.requests import ERR_TRUNCATE, RECEIVE, SEND, Request, Requests
from remesh.mpi.lower.streams import LARGEST_PIECE_BYTES, Direct, Discarding, Helping, Incoming, Outgoing
from remesh.mpi.lower.upper_memory import UpperMemory
from remesh.mpi.lower.wire import COPIED_PIECE_BYTES, OF_WINDOWS, PIECE_BYTES, Ahead, What, Wire

MAX_WATCHED = 64
"""Streams whose end is noticed at once; those beyond are looked after when something else happens."""


class Transfers:
    """The point-to-point side of a rank."""

    def __init__(self, wire: Wire, memory: UpperMemory, requests: Requests) -> None:
        self.wire, self.memory, self.requests = wire, memory, requests
        self.matching = Matching()
        self.messages: dict[int, Arrived] = {}
        """Taken out of the queue by a matched probe, by message number."""
        self.next_message = 1
        self.owed: list[tuple[Request, Arrived]] = []
        """Matched announcements whose payload has not been asked for, with their receives."""
        self.closed = False
        self.on_making: Callable[[int, int, int, Group], None] | None = None
        """Called with what is said about making a communicator."""
        self.on_window: Callable[[int, tuple[Any, ...], memoryview | bytes], None] | None = None
        """Called with what is said about windows."""
        self.on_part: Callable[[int, tuple[Any, ...], memoryview | bytes], None] | None = None
        """Called with parts of collectives."""
        self._streams: list[Outgoing | Incoming | Discarding | Direct | Helping] = []
        wire.on_message = self.on_message

    # What the upper half asks for.

    def send_eager(self, comm: int, dest: int, tag: int, payload: bytes) -> None:
        """Send a short payload; complete when this returns."""
        if dest == self.wire.rank:
            self._arrive(Arrived(comm, dest, tag, len(payload), payload, 0))
        else:
            self.wire.send(dest, (comm, tag, What.MESSAGE, 0, len(payload), 0, 0), payload)

    def send_announced(
        self, comm: int, dest: int, tag: int, address: int, num_bytes: int, *, blocking: bool
    ) -> Request:
        """Announce a payload that stays where it is until a receive matches it."""
        request = self.requests.start(kind=SEND, comm=comm, peer=dest, tag=tag, address=address, num_bytes=num_bytes)
        if dest == self.wire.rank:
            self._arrive(Arrived(comm, dest, tag, num_bytes, None, request.number))
        else:
            pid = self.memory.pid if dest in self.wire.neighbours else 0
            what = What.ANNOUNCED_WAITING if blocking else What.ANNOUNCED
            self.wire.send(dest, (comm, tag, what, request.number, num_bytes, pid, address))
        return request

    def receive(self, comm: int, source: int, tag: int, capacity: int, address: int, *, number: int = 0) -> Request:
        """Post a receive; it is done at once if its message has arrived whole."""
        request = self.requests.start(
            kind=RECEIVE, comm=comm, peer=source, tag=tag, address=address, num_bytes=capacity, number=number
        )
        message = self.matching.post(Posted(request.number, comm, source, tag))
        if message is not None:
            self.match(request, message)
        return request

    def probe(self, comm: int, source: int, tag: int, *, take: bool) -> tuple[Arrived | None, int]:
        """The message a receive would get, and the number it is kept under if it is taken out of the queue."""
        if not take:
            return self.matching.find(comm, source, tag), 0
        message = self.matching.take(comm, source, tag)
        if message is None:
            return None, 0
        number, self.next_message = self.next_message, self.next_message + 1
        self.messages[number] = message
        return message, number

    def receive_message(self, number: int, capacity: int, address: int) -> Request | None:
        """Receive a message that a matched probe has taken; None if there is none of this number."""
        message = self.messages.pop(number, None)
        if message is None:
            return None
        request = self.requests.start(
            kind=RECEIVE, comm=message.comm, peer=ANY, tag=ANY, address=address, num_bytes=capacity
        )
        self.match(request, message)
        return request

    def cancel(self, number: int) -> bool:
        """Cancel a receive that no message has come for; sends are never cancelled. Whether it was."""
        request = self.requests.by_number.get(number)
        if request is None or not self.matching.withdraw(number):
            return False
        request.cancelled = True
        self.requests.complete(request)
        return True

    # What comes from the others.

    def on_message(self, source: int, fields: tuple[Any, ...], payload: memoryview | bytes) -> None:
        """A wire message has come."""
        comm, tag, what, sender_request, num_bytes, pid, address = fields
        if what == What.MESSAGE:
            self._arrive(Arrived(comm, source, tag, num_bytes, bytes(payload), 0))
        elif what in (What.ANNOUNCED, What.ANNOUNCED_WAITING):
            seen_pid, waits = pid if source in self.wire.neighbours else 0, what == What.ANNOUNCED_WAITING
            self._arrive(Arrived(comm, source, tag, num_bytes, None, sender_request, seen_pid, address, waits))
        elif what in (What.ANNOUNCED_AHEAD, What.ANNOUNCED_AHEAD_WHOLE):
            whole = what == What.ANNOUNCED_AHEAD_WHOLE
            ahead = Ahead(source, pid, min(num_bytes, PIECE_BYTES), PIECE_BYTES if whole else COPIED_PIECE_BYTES)
            message = Arrived(comm, source, tag, num_bytes, None, sender_request, 0, address)
            message.ahead, message.ahead_piece = ahead.tag, ahead.piece_bytes
            if self.closed:
                self._decline(message)
            self._arrive(message)
        elif what == What.GIVEN_UP:
            self._discard(Ahead(source, num_bytes, address, tag))
        elif what == What.TAKEN:
            self.requests.complete(self.requests.by_number[sender_request])
        elif what in (What.JOIN, What.GO):
            assert self.on_making is not None
            self.on_making(source, what, comm, Group(sender_request, num_bytes))
        elif what in OF_WINDOWS:
            assert self.on_window is not None
            self.on_window(source, fields, payload)
        elif what == What.PART:
            assert self.on_part is not None
            self.on_part(source, fields, payload)
        elif what == What.HELPED:
            for stream in self._streams:
                if isinstance(stream, Direct):
                    stream.hear_helped(sender_request, is_done=bool(num_bytes))
        elif what == What.WANTED and not tag:
            request = self.requests.by_number[sender_request]
            if pid:
                self._streams.append(Helping(self, request, num_bytes, (pid, address)))
            else:
                self._streams.append(Outgoing(self, request, num_bytes, address))
        else:
            raise ValueError(
                f"rank {source} says {what} with tag {tag} of request {sender_request}, which fits nothing that rank "
                f"{self.wire.rank} has sent; run one version of remesh on all ranks"
            )

    def _arrive(self, message: Arrived) -> None:
        receive = self.matching.arrive(message)
        if receive is not None:
            self.match(self.requests.by_number[receive.request], message)

    def match(self, request: Request, message: Arrived) -> None:
        """A receive has got its message."""
        request.source, request.message_tag, request.message_bytes = message.source, message.tag, message.num_bytes
        if request.num_bytes != PARCEL and message.num_bytes > request.num_bytes:
            request.error = ERR_TRUNCATE
        if message.payload is not None:
            request.payload = message.payload
            self.requests.complete(request)
        elif self.closed:
            self.owed.append((request, message))
        else:
            self._ask_for(request, message)

    def _ask_for(self, request: Request, message: Arrived) -> None:
        if request.source == self.wire.rank:
            sender = self.requests.by_number[message.sender_request]
            request.payload = self.memory.read(sender.address, sender.num_bytes)
            self.requests.complete(sender)
            self.requests.complete(request)
            return
        if self.wire.engine is not None and self.wire.engine.take(request, message):
            return
        if message.pid and request.source in self.wire.neighbours:
            direct = Direct(self, request, message)
            if not direct.poll():
                self._streams.append(direct)
        else:
            is_whole = self._stand_in_arenas(request, message.address)
            piece_bytes = LARGEST_PIECE_BYTES if is_whole else COPIED_PIECE_BYTES
            self.stream(request, message.sender_request, piece_bytes, _ahead_of(message))

    def refused(self, request: Request, sender_request: int) -> None:
        """This process may not look into that one; over the network the payload goes from the beginning."""
        self.wire.neighbours = frozenset()
        self.stream(request, sender_request)

    def place_of(self, request: Request, offset: int, num_bytes: int) -> memoryview | None:
        """Where a part of a receive's payload goes in place; None where it has to be carried there."""
        if offset + num_bytes > request.num_bytes:
            return None
        return self.memory.view(request.address + offset, num_bytes)

    def _stand_in_arenas(self, request: Request, address: int) -> bool:
        # All arenas have the same addresses.
        there = self.memory.view(address, request.message_bytes)
        return there is not None and self.place_of(request, 0, request.message_bytes) is not None

    def stream(
        self, request: Request, sender_request: int, piece_bytes: int = COPIED_PIECE_BYTES, ahead: Ahead | None = None
    ) -> None:
        """Have the payload sent in pieces, but for what was sent ahead."""
        tag = self.wire.new_stream_tag()
        stream = Incoming(self, request, tag, piece_bytes, ahead)
        if not stream.poll():
            self._streams.append(stream)
        ahead_bytes = 0 if ahead is None else ahead.num_bytes
        # Of an empty message, too: its synchronous sender waits to hear that a receive has matched.
        if ahead is None or ahead_bytes < request.message_bytes:
            fields = (request.comm, ahead_bytes, What.WANTED, sender_request, tag, 0, piece_bytes)
            self.wire.send(request.source, fields)

    def poll(self) -> bool:
        """Move the open streams on; whether one has ended."""
        if not self._streams:
            return False
        # A stream that ends may begin another.
        before, self._streams = self._streams, []
        still = [stream for stream in before if not stream.poll()]
        self._streams = still + self._streams
        return len(still) != len(before)

    # Checkpoints.

    def close(self) -> None:
        """Begin no more transfers; what was sent ahead of messages that no receive has is given back."""
        self.closed = True
        for message in (*self.matching.arrived, *self.messages.values()):
            if message.ahead:
                self._decline(message)

    def discard_ahead(self) -> None:
        """Throw away what was sent ahead of messages that no receive has, all ranks being about to leave."""
        for message in (*self.matching.arrived, *self.messages.values()):
            ahead = _ahead_of(message)
            if ahead is not None:
                self._discard(ahead)
                message.ahead = 0

    def _discard(self, ahead: Ahead) -> None:
        stream = next((stream for stream in self._streams if isinstance(stream, Discarding)), None)
        if stream is None:
            stream = Discarding(self)
            self._streams.append(stream)
        stream.add(ahead)

    def _decline(self, message: Arrived) -> None:
        fields = (message.comm, 0, What.DECLINED, message.sender_request, message.ahead, 0, 0)
        message.ahead = 0
        self.wire.send(message.source, fields)

    def open(self) -> None:
        """Ask for the payloads that were announced while closed."""
        self.closed = False
        owed, self.owed = self.owed, []
        for request, message in owed:
            self._ask_for(request, message)

    def watched(self) -> list[int] | None:
        """Where the handles of the MPI requests stand that streams wait for; None if one does not wait for MPI."""
        if not self._streams:
            return []
        found = [stream.waits_for() for stream in self._streams[:MAX_WATCHED]]
        if None in found:
            return None
        return [self.wire.address_of(request) for requests in found for request in requests or ()]

    @property
    def streaming(self) -> bool:
        """Whether a payload is on its way."""
        return bool(self._streams) or (self.wire.engine is not None and self.wire.engine.carrying)

    @property
    def expecting(self) -> bool:
        """Whether something of ours will come over the wire: an open stream, a posted receive, an announced send."""
        return bool(self._streams or self.matching.posted or self._waiting_sends())

    def _waiting_sends(self) -> bool:
        return any(request.kind == SEND and not request.done for request in self.requests.by_number.values())


def _ahead_of(message: Arrived) -> Ahead | None:
    """What comes ahead of an announced message, if anything does."""
    if not message.ahead:
        return None
    return Ahead(message.source, message.ahead, min(message.num_bytes, PIECE_BYTES), message.ahead_piece)
