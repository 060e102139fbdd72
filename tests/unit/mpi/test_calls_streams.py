"""A long payload arrives whole, and no further than its buffer, whichever way it takes."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remesh.mpi.calls.table import PARCEL
from remesh.mpi.lower import streams
from remesh.mpi.lower.requests import Request, Requests
from remesh.mpi.lower.transfers import Transfers
from remesh.mpi.lower.upper_memory import UpperMemory
from remesh.mpi.lower.wire import COPIED_PIECE_BYTES, PIECE_BYTES, Ahead, What
from remesh.mpi.native import NATIVE


class _Piece:
    """An MPI request of a piece: over when both sides have come."""

    def __init__(self, view: Any) -> None:
        self.view = view
        self.over = False

    def Test(self) -> bool:
        return self.over


class _Wire:
    """A wire between two ranks of this process; wire messages are delivered by `deliver`."""

    def __init__(self, rank: int, *, near: bool) -> None:
        self.rank, self.size = rank, 2
        self.neighbours = frozenset({1 - rank}) if near else frozenset()
        self.other: _Wire = self
        self.engine = None
        self.on_message: Any = None
        self.coming: deque[tuple[Any, ...]] = deque()
        self.sent_pieces: dict[int, deque[_Piece]] = {}
        self.wanted_pieces: dict[int, deque[_Piece]] = {}
        self.piece_sizes: list[int] = []

    def send(self, dest: int, fields: tuple[Any, ...], payload: bytes = b"") -> None:
        self.other.coming.append((self.rank, fields, payload))

    def deliver(self) -> None:
        while self.coming:
            self.on_message(*self.coming.popleft())

    def new_stream_tag(self) -> int:
        return 1

    def send_piece(self, dest: int, tag: int, piece: Any) -> _Piece:
        self.piece_sizes.append(len(piece))
        return self._meet(_Piece(piece), self.sent_pieces, self.other.wanted_pieces, tag)

    def receive_piece(self, source: int, tag: int, piece: Any) -> _Piece:
        return self._meet(_Piece(piece), self.wanted_pieces, self.other.sent_pieces, tag)

    def _meet(self, piece: _Piece, own: dict[int, deque[_Piece]], others: dict[int, deque[_Piece]], tag: int) -> _Piece:
        waiting = others.get(tag)
        if not waiting:
            own.setdefault(tag, deque()).append(piece)
            return piece
        met = waiting.popleft()
        source, target = (met, piece) if own is self.wanted_pieces else (piece, met)
        target.view[: len(source.view)] = source.view
        piece.over = met.over = True
        return piece


class _Arena:
    """Shares some buffers of this process, by their addresses."""

    def __init__(self, *buffers: bytearray) -> None:
        self._buffers = [(NATIVE.address_of(buffer), memoryview(buffer)) for buffer in buffers]

    def view(self, address: int, num_bytes: int) -> memoryview | None:
        for start, view in self._buffers:
            if start <= address and address + num_bytes <= start + len(view):
                return view[address - start : address - start + num_bytes]
        return None


def _pair(*, near: bool) -> tuple[Transfers, Transfers]:
    wires = _Wire(0, near=near), _Wire(1, near=near)
    wires[0].other, wires[1].other = wires[1], wires[0]
    halves = []
    for wire in wires:
        memory = UpperMemory()
        memory.attach(os.getpid())
        halves.append(Transfers(wire, memory, Requests(Request)))  # type: ignore[arg-type]
    return halves[0], halves[1]


def _carry(sender: Transfers, receiver: Transfers, source: bytearray, target: bytearray | None, *, waits: bool) -> Any:
    """Send from one to the other; the receive's request."""
    sender.send_announced(7, 1, 3, NATIVE.address_of(source), len(source), blocking=waits)
    place = (PARCEL, 0) if target is None else (len(target), NATIVE.address_of(target))
    request = receiver.receive(7, 0, 3, *place)
    for _ in range(200):
        receiver.wire.deliver()  # type: ignore[attr-defined]
        receiver.poll()
        sender.wire.deliver()  # type: ignore[attr-defined]
        sender.poll()
    assert not sender.streaming and not receiver.streaming and not sender.wire.coming  # type: ignore[attr-defined]
    return request


@given(
    num_bytes=st.sampled_from([40_000, 300_001, (1 << 20) + 7, 3 << 20]),
    room=st.sampled_from([None, "short", "same", "more"]),
    near=st.booleans(),
    waits=st.booleans(),
    shared=st.tuples(st.booleans(), st.booleans()),
)
@settings(deadline=None, max_examples=60)
def test_a_payload_lands_whole_and_nowhere_else(
    num_bytes: int, room: str | None, near: bool, waits: bool, shared: tuple[bool, bool]
) -> None:
    source = bytearray(os.urandom(num_bytes))
    capacity = {None: 0, "short": num_bytes - 9_999, "same": num_bytes, "more": num_bytes + 50}[room]
    # What stands behind the buffer must stay as it is.
    memory = bytearray(b"\xaa") * (capacity + 4096)
    target = None if room is None else memoryview(memory)[:capacity]
    sender, receiver = _pair(near=near)
    arena = _Arena(*[buffer for buffer, is_in in ((source, shared[0]), (memory, shared[1])) if is_in])
    sender.memory.arena = receiver.memory.arena = arena  # type: ignore[assignment]
    request = _carry(sender, receiver, source, target, waits=waits)  # type: ignore[arg-type]
    assert request.done and bool(request.error) == (room == "short")
    landed = request.payload if target is None else memory
    length = min(num_bytes, capacity) if target is not None else num_bytes
    assert landed[:length] == source[:length]
    assert target is None or memory[length:] == b"\xaa" * (len(memory) - length)
    sizes = sender.wire.piece_sizes  # type: ignore[attr-defined]
    if near:
        assert sizes == [], "on one host it is read where it is"
    elif all(shared) and room in ("same", "more"):
        assert sizes == [num_bytes], "between shared arrays it is one message"


@pytest.mark.parametrize("room", [None, 0, 50])
@pytest.mark.parametrize("near", [False, True])
def test_an_empty_synchronous_send_is_over_when_a_receive_has_matched(room: int | None, near: bool) -> None:
    sender, receiver = _pair(near=near)
    send = sender.send_announced(7, 1, 3, 0, 0, blocking=True)
    receiver.wire.deliver()  # type: ignore[attr-defined]
    assert not send.done
    target = bytearray(50)
    receive = receiver.receive(7, 0, 3, *((PARCEL, 0) if room is None else (room, NATIVE.address_of(target))))
    for _ in range(3):
        for half in (sender, receiver):
            half.wire.deliver()  # type: ignore[attr-defined]
            half.poll()
    assert send.done and receive.done and not sender.streaming and not receiver.streaming


def test_a_receiver_without_help_carries_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = _pair(near=True)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "not yours")

    monkeypatch.setattr(sender.memory, "copy_to", refuse)
    source, target = bytearray(os.urandom(1 << 20)), bytearray(1 << 20)
    assert _carry(sender, receiver, source, target, waits=True).done
    assert target == source


@pytest.mark.parametrize("waits", [False, True])
def test_who_may_not_look_into_the_other_takes_it_from_the_wire(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    sender, receiver = _pair(near=True)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "not yours")

    monkeypatch.setattr(receiver.memory, "copy_from", refuse)
    source, target = bytearray(os.urandom(2 << 20)), bytearray(2 << 20)
    assert _carry(sender, receiver, source, target, waits=waits).done
    assert target == source and sender.wire.piece_sizes[-1] == COPIED_PIECE_BYTES  # type: ignore[attr-defined]


def test_long_payloads_are_carried_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_BYTES_AT_ONCE", 1 << 16)
    sender, receiver = _pair(near=True)
    source, target = bytearray(os.urandom(1 << 20)), bytearray(1 << 20)
    assert _carry(sender, receiver, source, target, waits=True).done
    assert target == source


_AHEAD_TAG = 15_001


class _SenderAhead:
    """Rank 0 as an engine is: a piece's worth of each payload goes with its announcement."""

    def __init__(self, wire: Any, source: bytearray, *, is_whole: bool) -> None:
        self._wire, self._source = wire, memoryview(source)
        num_bytes, piece_bytes = len(source), PIECE_BYTES if is_whole else COPIED_PIECE_BYTES
        self._ahead: Ahead | None = Ahead(0, _AHEAD_TAG, min(num_bytes, PIECE_BYTES), piece_bytes)
        self.wanted_from: list[int] = []
        wire.on_message = self._on_message
        what = What.ANNOUNCED_AHEAD_WHOLE if is_whole else What.ANNOUNCED_AHEAD
        wire.send(1, (7, 3, what, 1, num_bytes, _AHEAD_TAG, NATIVE.address_of(source)))
        self.pieces = [wire.send_piece(1, _AHEAD_TAG, piece) for piece in self._cut(0, num_bytes, self._ahead)]

    def _cut(self, start: int, end: int, ahead: Ahead) -> list[memoryview]:
        ends = [start + sum(ahead.pieces[: index + 1]) for index in range(len(ahead.pieces))]
        return [self._source[one:other] for one, other in zip([start, *ends], ends, strict=False)]

    def _on_message(self, source: int, fields: tuple[Any, ...], payload: bytes) -> None:
        comm, start, what, request, tag, _, piece_bytes = fields
        assert (comm, request) == (7, 1)
        if what == What.DECLINED:
            assert self._ahead is not None
            ahead, self._ahead = self._ahead, None
            self._wire.send(1, (7, ahead.piece_bytes, What.GIVEN_UP, 0, ahead.tag, 0, ahead.num_bytes))
            return
        assert what == What.WANTED and start == (0 if self._ahead is None else self._ahead.num_bytes)
        self.wanted_from.append(start)
        for at in range(start, len(self._source), piece_bytes):
            self.pieces.append(self._wire.send_piece(1, tag, self._source[at : at + piece_bytes]))


@given(
    num_bytes=st.sampled_from([40_000, PIECE_BYTES // 2 + 1, PIECE_BYTES, (1 << 20) + 7, 3 << 20]),
    room=st.sampled_from([None, "short", "same", "more"]),
    is_whole=st.booleans(),
    shared=st.booleans(),
    order=st.sampled_from(["receive first", "announced first", "closed, then receive", "closed before it came"]),
)
@settings(deadline=None, max_examples=80)
def test_what_came_ahead_is_the_beginning_of_the_payload_unless_ranks_closed(
    num_bytes: int, room: str | None, is_whole: bool, shared: bool, order: str
) -> None:
    source = bytearray(os.urandom(num_bytes))
    capacity = {None: 0, "short": num_bytes - 9_999, "same": num_bytes, "more": num_bytes + 50}[room]
    target = bytearray(b"\xaa") * (capacity + 4096)
    sender, receiver = _pair(near=False)
    receiver.memory.arena = _Arena(source, target) if shared and is_whole else None  # type: ignore[assignment]
    place = (PARCEL, 0) if room is None else (capacity, NATIVE.address_of(target))
    wires: Any = (sender.wire, receiver.wire)

    def turn() -> None:
        for _ in range(20):
            wires[1].deliver()
            receiver.poll()
            wires[0].deliver()

    request = receiver.receive(7, 0, 3, *place) if order in ("receive first", "closed before it came") else None
    if order == "closed before it came":
        receiver.close()
    ahead = _SenderAhead(wires[0], source, is_whole=is_whole)
    turn()
    if order == "closed, then receive":
        receiver.close()
        turn()
    if "closed" in order:
        assert all(piece.over for piece in ahead.pieces) and not receiver.streaming, "nothing stays in MPI"
        assert not any(message.ahead for message in receiver.matching.arrived)
        receiver.open()
    if request is None:
        request = receiver.receive(7, 0, 3, *place)
    turn()
    assert request.done and bool(request.error) == (room == "short") and not receiver.streaming
    landed, length = (request.payload, num_bytes) if room is None else (target, min(num_bytes, capacity))
    assert landed is not None and landed[:length] == source[:length]
    assert room is None or target[length:] == b"\xaa" * (len(target) - length)
    assert ahead.wanted_from == ([0] if "closed" in order else [PIECE_BYTES] if num_bytes > PIECE_BYTES else [])


def test_what_leaving_programs_have_not_received_is_taken_from_mpi_without_a_word() -> None:
    sender, receiver = _pair(near=False)
    wires: Any = (sender.wire, receiver.wire)
    ahead = _SenderAhead(wires[0], bytearray(PIECE_BYTES), is_whole=False)
    wires[1].deliver()
    receiver.discard_ahead()
    while receiver.poll() or receiver.streaming:
        pass
    assert all(piece.over for piece in ahead.pieces) and not wires[0].coming


@pytest.mark.parametrize(
    "fields",
    [
        (7, 3, What.ANNOUNCED_AHEAD, 1, 40_000, 15_000, 0),
        (7, 3, What.GIVEN_UP, 0, 40_000, 1, 0),
        (7, 9, What.WANTED, 1, 5, 0, PIECE_BYTES),
        (7, 0, What.DECLINED, 1, _AHEAD_TAG, 0, 0),
    ],
    ids=["tag", "given-up", "wanted", "declined"],
)
def test_a_rank_without_an_engine_refuses_what_does_not_fit(fields: tuple[int, ...]) -> None:
    half, _ = _pair(near=False)
    half.send_announced(7, 1, 3, 0, 40_000, blocking=False)
    with pytest.raises(ValueError, match="run one version of remesh"):
        half.on_message(1, fields, b"")
