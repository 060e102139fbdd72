"""How does a long payload get from one buffer to another? One class for each way and each of its ends.

Each is polled until it is over; in between it says which requests of MPI's it waits for, or that it goes on by itself.
transfers.py chooses the way, and says what is exchanged before and after.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from remesh.mpi.calls.table import PARCEL
from remesh.mpi.lower.matching import Arrived
from remesh.mpi.lower.requests import Request
from remesh.mpi.lower.wire import Ahead, What

if TYPE_CHECKING:
    from remesh.mpi.lower.transfers import Transfers

_PIECES_IN_FLIGHT = 4
LARGEST_PIECE_BYTES = 1 << 28
"""Of a payload that stands in the arenas of both."""
_SHARED_WORK_BYTES = 1 << 18
"""Of a payload that two processes carry sooner than one."""
_BYTES_AT_ONCE = 1 << 24
"""Read from a neighbour before the program and MPI are looked after again."""


class _InPieces:
    """What both ends of a stream have: pieces under way, the oldest first."""

    def __init__(self, transfers: Transfers, request: Request, tag: int, piece_bytes: int) -> None:
        self._transfers, self._request, self._tag = transfers, request, tag
        self._piece_bytes = piece_bytes
        self._offset = 0
        self._in_flight: deque[tuple[Any, memoryview, bytearray | None]] = deque()

    def waits_for(self) -> list[Any] | None:
        """The MPI request that it waits for, None if it does not."""
        return [self._in_flight[0][0]] if self._in_flight else None


class Outgoing(_InPieces):
    """A stream to a receiver: reads pieces of the sender's buffer and hands them to MPI, some at a time."""

    def poll(self) -> bool:
        request, memory, wire = self._request, self._transfers.memory, self._transfers.wire
        while self._in_flight and self._in_flight[0][0].Test():
            _, view, buffer = self._in_flight.popleft()
            view.release()
            memory.give_back(buffer)
        while self._offset < request.num_bytes and len(self._in_flight) < _PIECES_IN_FLIGHT:
            num_bytes = min(self._piece_bytes, request.num_bytes - self._offset)
            view, buffer = self._next_piece(num_bytes)
            self._offset += num_bytes
            self._in_flight.append((wire.send_piece(request.peer, self._tag, view), view, buffer))
        if self._in_flight or self._offset < request.num_bytes:
            return False
        self._transfers.requests.complete(request)
        return True

    def _next_piece(self, num_bytes: int) -> tuple[memoryview, bytearray | None]:
        """Bytes to send, and the buffer that they were copied to; None where they stand in the arena."""
        memory, address = self._transfers.memory, self._request.address + self._offset
        place = memory.view(address, num_bytes)
        if place is not None:
            return place, None
        buffer = memory.borrow()
        view = memoryview(buffer)[:num_bytes]
        memory.read_into(address, view)
        return view, buffer


class Incoming(_InPieces):
    """A stream from a sender: into the receiver's buffer as far as that reaches, or into a parcel."""

    def __init__(
        self, transfers: Transfers, request: Request, tag: int, piece_bytes: int, ahead: Ahead | None = None
    ) -> None:
        """``ahead``: what comes unasked, with its own tag."""
        super().__init__(transfers, request, tag, piece_bytes)
        self._asked = 0
        self._ahead = ahead
        self._ahead_pieces = deque(ahead.pieces if ahead is not None else ())
        if request.num_bytes == PARCEL:
            request.payload = bytearray(request.message_bytes)

    def _ask(self) -> None:
        request, memory, wire = self._request, self._transfers.memory, self._transfers.wire
        if self._ahead is not None and self._ahead_pieces:
            tag, num_bytes = self._ahead.tag, self._ahead_pieces.popleft()
        else:
            tag, num_bytes = self._tag, min(self._piece_bytes, request.message_bytes - self._asked)
        buffer: bytearray | None = None
        view = self._transfers.place_of(request, self._asked, num_bytes)
        if isinstance(request.payload, bytearray):
            view = memoryview(request.payload)[self._asked : self._asked + num_bytes]
        elif view is None:
            buffer = memory.borrow()
            view = memoryview(buffer)[:num_bytes]
        self._asked += num_bytes
        self._in_flight.append((wire.receive_piece(request.source, tag, view), view, buffer))

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


class Discarding:
    """What was sent ahead and no receive had matched when the ranks closed: MPI must not keep it."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._buffer = transfers.memory.borrow()
        self._left: deque[tuple[int, int, int]] = deque()
        self._piece: Any = None

    def add(self, ahead: Ahead) -> None:
        """This too. One piece is taken at a time, however many ranks have sent some."""
        self._left.extend((ahead.source, ahead.tag, num_bytes) for num_bytes in ahead.pieces)

    def poll(self) -> bool:
        while self._piece is None or self._piece.Test():
            if not self._left:
                self._transfers.memory.give_back(self._buffer)
                return True
            source, tag, num_bytes = self._left.popleft()
            self._piece = self._transfers.wire.receive_piece(source, tag, memoryview(self._buffer)[:num_bytes])
        return False

    def waits_for(self) -> list[Any] | None:
        """The MPI request of a piece; None if it does not wait."""
        return None if self._piece is None else [self._piece]


class Direct:
    """A payload that is read out of the memory of the sender's upper half, half of it by the sender if that waits."""

    def __init__(self, transfers: Transfers, request: Request, message: Arrived) -> None:
        self._transfers, self._request, self._message = transfers, request, message
        self._offset = 0
        self._end = request.message_bytes
        self._failed = False
        self._awaits_help = False
        if request.num_bytes == PARCEL:
            request.payload = bytearray(request.message_bytes)
        elif request.num_bytes < request.message_bytes:
            self._end = request.num_bytes
        elif message.waits and request.message_bytes >= _SHARED_WORK_BYTES:
            self._end = _first_half(request.message_bytes)
            self._awaits_help = True
            pid = transfers.memory.pid
            fields = (request.comm, 0, What.WANTED, message.sender_request, request.number, pid, request.address)
            transfers.wire.send(request.source, fields)

    def hear_helped(self, receive: int, *, is_done: bool) -> None:
        """The sender has carried its half of what a receive wants, or may not."""
        if self._awaits_help and self._request.number == receive:
            self._awaits_help = False
            if not is_done and not self._failed:
                self._end = self._request.message_bytes

    def poll(self) -> bool:
        request, transfers = self._request, self._transfers
        if self._offset < self._end:
            try:
                self._copy_some()
            except OSError:
                self._failed = True
                self._offset = self._end
        if self._offset < self._end or self._awaits_help:
            return False
        if self._failed:
            transfers.refused(request, self._message.sender_request)
            return True
        request.written = request.num_bytes != PARCEL
        transfers.requests.complete(request)
        taken = (request.comm, 0, What.TAKEN, self._message.sender_request, 0, 0, 0)
        transfers.wire.send(request.source, taken)
        return True

    def _copy_some(self) -> None:
        request, memory, message = self._request, self._transfers.memory, self._message
        num_bytes = min(_BYTES_AT_ONCE, self._end - self._offset)
        view = self._transfers.place_of(request, self._offset, num_bytes)
        if isinstance(request.payload, bytearray):
            view = memoryview(request.payload)[self._offset : self._offset + num_bytes]
        source = message.address + self._offset
        if view is not None:
            memory.read_from(message.pid, source, view)
        else:
            memory.copy_from(message.pid, source, request.address + self._offset, num_bytes)
        self._offset += num_bytes

    def waits_for(self) -> list[Any] | None:
        """No request of MPI's: it waits for a wire message, or goes on by itself (None)."""
        return [] if self._offset == self._end else None


class Helping:
    """The second half of a payload, written into the memory of the receiver's upper half by the sender."""

    def __init__(self, transfers: Transfers, request: Request, receive: int, target: tuple[int, int]) -> None:
        """``receive``: the request there; ``target``: process and address."""
        self._transfers, self._request, self._receive = transfers, request, receive
        self._pid, self._address = target
        self._offset = _first_half(request.num_bytes)

    def poll(self) -> bool:
        request, transfers = self._request, self._transfers
        num_bytes = min(_BYTES_AT_ONCE, request.num_bytes - self._offset)
        is_done = True
        try:
            source, target = request.address + self._offset, self._address + self._offset
            transfers.memory.copy_to(self._pid, source, target, num_bytes)
            self._offset += num_bytes
            if self._offset < request.num_bytes:
                return False
        except OSError:
            is_done = False
        transfers.wire.send(request.peer, (request.comm, 0, What.HELPED, self._receive, int(is_done), 0, 0))
        return True

    def waits_for(self) -> list[Any] | None:
        """Nothing: it goes on by itself."""


def _first_half(num_bytes: int) -> int:
    """What the receiver carries itself, to the end of a page."""
    return num_bytes // 2 & ~4095
