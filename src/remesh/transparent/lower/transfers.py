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

Where a buffer stands in the arena MPI works on it in place. If both do, the whole payload is one piece: the program's
message is then one message of the real MPI, whatever the network.

While closed no payload is asked for: the open handshake is ``owed``, and part of the saved state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remesh.transparent.calls.table import ANY, PARCEL
from remesh.transparent.lower.collectives import Group
from remesh.transparent.lower.matching import Matching
from remesh.transparent.lower.memory import UpperMemory
from remesh.transparent.lower.records import Arrived, Posted
from remesh.transparent.lower.requests import ERR_TRUNCATE, RECEIVE, SEND, Request, Requests
from remesh.transparent.lower.wire import PIECE_BYTES, What, Wire

_PIECES_IN_FLIGHT = 4
MAX_WATCHED = 64
"""Streams whose end is noticed at once; those beyond are looked after when something else happens."""
_LARGEST_PIECE_BYTES = 1 << 28
"""Of a payload that stands in the arenas of both."""
_BYTES_AT_ONCE = 1 << 24
"""Read from a neighbour before the program and MPI are looked after again."""


class _Outgoing:
    """A stream to a receiver: reads pieces of the sender's buffer and hands them to MPI, some at a time."""

    def __init__(self, transfers: Transfers, request: Request, tag: int, piece_bytes: int) -> None:
        self._transfers, self._request, self._tag = transfers, request, tag
        self._piece_bytes = piece_bytes
        self._offset = 0
        self._in_flight: deque[tuple[Any, memoryview, bytearray | None]] = deque()

    def poll(self) -> bool:
        request, memory, wire = self._request, self._transfers.memory, self._transfers.wire
        while self._in_flight and self._in_flight[0][0].Test():
            _, view, buffer = self._in_flight.popleft()
            view.release()
            memory.give_back(buffer)
        while self._offset < request.num_bytes and len(self._in_flight) < _PIECES_IN_FLIGHT:
            num_bytes = min(self._piece_bytes, request.num_bytes - self._offset)
            view, buffer = memory.view(request.address + self._offset, num_bytes), None
            if view is None:
                buffer = memory.borrow()
                view = memoryview(buffer)[:num_bytes]
                memory.read_into(request.address + self._offset, view)
            self._offset += num_bytes
            self._in_flight.append((wire.send_piece(request.peer, self._tag, view), view, buffer))
        if self._in_flight or self._offset < request.num_bytes:
            return False
        self._transfers.requests.complete(request)
        return True

    def waits_for(self) -> Any:
        """The MPI request that it waits for, None if it does not."""
        return self._in_flight[0][0] if self._in_flight else None


class _Incoming:
    """A stream from a sender: into the receiver's buffer as far as that reaches, or into a parcel."""

    def __init__(self, transfers: Transfers, request: Request, tag: int, piece_bytes: int) -> None:
        self._transfers, self._request, self._tag = transfers, request, tag
        self._piece_bytes = piece_bytes
        self._asked = 0
        self._offset = 0
        self._in_flight: deque[tuple[Any, memoryview, bytearray | None]] = deque()
        if request.num_bytes == PARCEL:
            request.payload = bytearray(request.message_bytes)

    def _ask(self) -> None:
        request, memory, wire = self._request, self._transfers.memory, self._transfers.wire
        num_bytes = min(self._piece_bytes, request.message_bytes - self._asked)
        buffer: bytearray | None = None
        view = self._transfers.place_of(request, self._asked, num_bytes)
        if isinstance(request.payload, bytearray):
            view = memoryview(request.payload)[self._asked : self._asked + num_bytes]
        elif view is None:
            buffer = memory.borrow()
            view = memoryview(buffer)[:num_bytes]
        self._asked += num_bytes
        self._in_flight.append((wire.receive_piece(request.source, self._tag, view), view, buffer))

    def poll(self) -> bool:
        request, memory = self._request, self._transfers.memory
        while self._asked < request.message_bytes and len(self._in_flight) < _PIECES_IN_FLIGHT:
            self._ask()
        while self._in_flight and self._in_flight[0][0].Test():
            _, view, buffer = self._in_flight.popleft()
            if buffer is not None:
                room = max(0, request.num_bytes - self._offset)
                memory.write(request.address + self._offset, view[:room])
            self._offset += len(view)
            view.release()
            memory.give_back(buffer)
            if self._asked < request.message_bytes:
                self._ask()
        if self._offset < request.message_bytes:
            return False
        request.written = request.num_bytes != PARCEL
        self._transfers.requests.complete(request)
        return True

    def waits_for(self) -> Any:
        """The MPI request that it waits for, None if it does not."""
        return self._in_flight[0][0] if self._in_flight else None


class _Direct:
    """A payload that is read out of the memory of the sender's upper half."""

    def __init__(self, transfers: Transfers, request: Request, sender_request: int, place: Place) -> None:
        self._transfers, self._request, self._place = transfers, request, place
        self._sender_request = sender_request
        self._offset = 0
        self._num_bytes = request.message_bytes
        if request.num_bytes == PARCEL:
            request.payload = bytearray(request.message_bytes)
        else:
            self._num_bytes = min(self._num_bytes, request.num_bytes)

    def poll(self) -> bool:
        request, transfers, place = self._request, self._transfers, self._place
        num_bytes = min(_BYTES_AT_ONCE, self._num_bytes - self._offset)
        try:
            view = transfers.place_of(request, self._offset, num_bytes)
            if isinstance(request.payload, bytearray):
                view = memoryview(request.payload)[self._offset : self._offset + num_bytes]
            if view is not None:
                transfers.memory.read_from(place.pid, place.address + self._offset, view)
            else:
                address = request.address + self._offset
                transfers.memory.copy_from(place.pid, place.address + self._offset, address, num_bytes)
        except OSError:
            # This process may not look into that one; over the network it goes from the beginning.
            transfers.places.clear()
            transfers.wire.neighbours = frozenset()
            transfers.stream(request, self._sender_request)
            return True
        self._offset += num_bytes
        if self._offset < self._num_bytes:
            return False
        request.written = request.num_bytes != PARCEL
        transfers.requests.complete(request)
        transfers.wire.send(request.source, (request.comm, 0, What.TAKEN, self._sender_request, 0, 0, 0))
        return True

    def waits_for(self) -> Any:
        """None: it goes on by itself."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload is that has been announced; good only as long as this stay."""

    pid: int  # as all ranks of this host see it; 0 for a rank elsewhere
    address: int


class Transfers:
    """The point-to-point side of a rank."""

    def __init__(self, wire: Wire, memory: UpperMemory, requests: Requests) -> None:
        self.wire, self.memory, self.requests = wire, memory, requests
        self.matching = Matching()
        self.messages: dict[int, Arrived] = {}
        """Taken out of the queue by a matched probe, by message number."""
        self.next_message = 1
        self.owed: list[tuple[Request, int]] = []
        """Matched announcements whose payload has not been asked for: the receive, the request at the sender."""
        self.closed = False
        self.on_making: Callable[[int, int, int, Group], None] | None = None
        """Called with what is said about making a communicator."""
        self.places: dict[tuple[int, int], Place] = {}
        """Of announced payloads, by sender and its request."""
        self._streams: list[_Outgoing | _Incoming | _Direct] = []
        wire.on_message = self.on_message

    # What the upper half asks for.

    def send_eager(self, comm: int, dest: int, tag: int, payload: bytes) -> None:
        """Send a short payload; complete when this returns."""
        if dest == self.wire.rank:
            self._arrive(Arrived(comm, dest, tag, len(payload), payload, 0))
        else:
            self.wire.send(dest, (comm, tag, What.MESSAGE, 0, len(payload), 0, 0), payload)

    def send_announced(self, comm: int, dest: int, tag: int, address: int, num_bytes: int) -> Request:
        """Announce a payload that stays where it is until a receive matches it."""
        request = self.requests.start(kind=SEND, comm=comm, peer=dest, tag=tag, address=address, num_bytes=num_bytes)
        if dest == self.wire.rank:
            self._arrive(Arrived(comm, dest, tag, num_bytes, None, request.number))
        else:
            pid = self.memory.pid if dest in self.wire.neighbours else 0
            self.wire.send(dest, (comm, tag, What.ANNOUNCED, request.number, num_bytes, pid, address))
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
        elif what == What.ANNOUNCED:
            self.places[source, sender_request] = Place(pid if source in self.wire.neighbours else 0, address)
            self._arrive(Arrived(comm, source, tag, num_bytes, None, sender_request))
        elif what == What.TAKEN:
            self.requests.complete(self.requests.by_number[sender_request])
        elif what in (What.JOIN, What.GO):
            assert self.on_making is not None
            self.on_making(source, what, comm, Group(sender_request, num_bytes))
        else:
            self._streams.append(_Outgoing(self, self.requests.by_number[sender_request], num_bytes, address))

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
            self.owed.append((request, message.sender_request))
        else:
            self._ask_for(request, message.sender_request)

    def _ask_for(self, request: Request, sender_request: int) -> None:
        if request.source == self.wire.rank:
            sender = self.requests.by_number[sender_request]
            request.payload = self.memory.read(sender.address, sender.num_bytes)
            self.requests.complete(sender)
            self.requests.complete(request)
            return
        place = self.places.pop((request.source, sender_request), None)
        if place is not None and self._stand_in_arenas(request, place):
            self.stream(request, sender_request, _LARGEST_PIECE_BYTES)
            return
        if place is None or not place.pid:
            self.stream(request, sender_request)
            return
        direct = _Direct(self, request, sender_request, place)
        if not direct.poll():
            self._streams.append(direct)

    def place_of(self, request: Request, offset: int, num_bytes: int) -> memoryview | None:
        """Where a part of a receive's payload goes in place; None where it has to be carried there."""
        if offset + num_bytes > request.num_bytes:
            return None
        return self.memory.view(request.address + offset, num_bytes)

    def _stand_in_arenas(self, request: Request, place: Place) -> bool:
        # All arenas have the same addresses.
        there = self.memory.view(place.address, request.message_bytes)
        return there is not None and self.place_of(request, 0, request.message_bytes) is not None

    def stream(self, request: Request, sender_request: int, piece_bytes: int = PIECE_BYTES) -> None:
        """Have the payload sent in pieces."""
        tag = self.wire.new_stream_tag()
        stream = _Incoming(self, request, tag, piece_bytes)
        if not stream.poll():
            self._streams.append(stream)
        self.wire.send(request.source, (request.comm, 0, What.WANTED, sender_request, tag, 0, piece_bytes))

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

    def open(self) -> None:
        """Ask for the payloads that were announced while closed."""
        self.closed = False
        owed, self.owed = self.owed, []
        for request, sender_request in owed:
            self._ask_for(request, sender_request)

    def watched(self) -> list[int] | None:
        """Where the handles of the MPI requests stand that streams wait for; None if one does not wait for MPI."""
        if not self._streams:
            return []
        found = [stream.waits_for() for stream in self._streams[:MAX_WATCHED]]
        if None in found:
            return None
        return [self.wire.address_of(request) for request in found]

    @property
    def streaming(self) -> bool:
        """Whether a payload is on its way."""
        return bool(self._streams)

    @property
    def expecting(self) -> bool:
        """Whether something of ours will come over the wire: an open stream, a posted receive, an announced send."""
        return bool(self._streams or self.matching.posted or self._waiting_sends())

    def _waiting_sends(self) -> bool:
        return any(request.kind == SEND and not request.done for request in self.requests.by_number.values())
