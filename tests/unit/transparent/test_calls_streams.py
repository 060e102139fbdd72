"""A long payload arrives whole, and no further than its buffer, whichever way it takes."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remesh.transparent.calls.table import PARCEL
from remesh.transparent.lower import streams
from remesh.transparent.lower.memory import UpperMemory
from remesh.transparent.lower.requests import Request, Requests
from remesh.transparent.lower.transfers import Transfers
from remesh.transparent.lower.wire import PIECE_BYTES
from remesh.transparent.native import NATIVE


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
    assert target == source and sender.wire.piece_sizes[-1] == PIECE_BYTES  # type: ignore[attr-defined]


def test_long_payloads_are_carried_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_BYTES_AT_ONCE", 1 << 16)
    sender, receiver = _pair(near=True)
    source, target = bytearray(os.urandom(1 << 20)), bytearray(1 << 20)
    assert _carry(sender, receiver, source, target, waits=True).done
    assert target == source
