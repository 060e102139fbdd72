"""A long payload of unknown size, or longer than its buffer, arrives whole and no further than its buffer."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from remesh.carried.mpi.calls.table import BY_NAME, FIRST_POSTED, PARCEL, CallFlag
from remesh.carried.mpi.calls.wire_messages import HEADER, What
from remesh.carried.mpi.native import NATIVE
from tests.unit.carried.mpi.fake_mpi import ring
from tests.unit.carried.mpi.program_side import Port
from tests.unit.carried.mpi.test_calls_engine import (
    _PIECE_BYTES,
    _both_turn,
    _Half,
    _receive_long,
    _send_long,
    _two,
)

_PIECES_AT_ONCE = 2


def _receive(half: _Half, target: memoryview | None, source: int = -1) -> None:
    place = (PARCEL, 0) if target is None else (len(target), NATIVE.address_of(target))
    assert Port(half.upper, 0).start_receive(FIRST_POSTED, 7, source, 3, *place)


def _landed(half: _Half, target: memoryview | None) -> bytes:
    """What the program gets."""
    request = half.requests.by_number[FIRST_POSTED]
    assert request.done and not half.engine.carrying
    if request.written:
        assert target is not None
        return bytes(target[: request.message_bytes])
    return bytes(request.payload[: len(request.payload) if target is None else len(target)])


@given(
    num_bytes=st.sampled_from([40_000, _PIECE_BYTES // 2 + 1, _PIECE_BYTES, 300_001, (1 << 20) + 7]),
    room=st.sampled_from([None, "none", "short", "same", "more"]),
    near=st.booleans(),
    waits=st.booleans(),
    order=st.sampled_from(["receive first", "announced first", "closed, then receive", "closed before it came"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_payload_lands_whole_and_nowhere_else(
    tmp_path_factory: pytest.TempPathFactory, num_bytes: int, room: str | None, near: bool, waits: bool, order: str
) -> None:
    source = bytearray(os.urandom(num_bytes))
    capacity = {None: 0, "none": 0, "short": num_bytes - 9_999, "same": num_bytes, "more": num_bytes + 50}[room]
    # What stands behind the buffer must stay as it is.
    memory = bytearray(b"\xaa") * (capacity + 4096)
    target = None if room is None else memoryview(memory)[:capacity]
    sender, receiver = _two(tmp_path_factory.mktemp("streams"), near=near)
    if order in ("receive first", "closed before it came"):
        _receive(receiver, target)
        receiver.turn()
    if order == "closed before it came":
        receiver.engine.set(True, 0)
    _send_long(sender, source, waits=waits)
    _both_turn(sender, receiver)
    if order == "closed, then receive":
        receiver.engine.set(True, 0)
        for message in receiver.matching.arrived:
            if message.ahead:
                receiver.engine.decline(message)
        _both_turn(sender, receiver)
    if "closed" in order:
        assert not receiver.pieces and not sender.engine.carrying and not receiver.engine.carrying
        receiver.engine.set(False, 0)
        for owed in receiver.owed:
            receiver.engine.match(*owed)
    if order in ("announced first", "closed, then receive"):
        _receive(receiver, target)
    _both_turn(sender, receiver)
    request = receiver.requests.by_number[FIRST_POSTED]
    assert bool(request.error) == (room in ("none", "short")) and request.message_bytes == num_bytes
    assert _landed(receiver, target) == source[: num_bytes if room in (None, "more") else capacity]
    assert room is None or memory[capacity:] == b"\xaa" * 4096
    assert not sender.engine.carrying and sender.upper.pending() == 0


def _send(half: _Half, source: Any, dest: int, flags: int) -> None:
    fields = (flags, 7, dest, 3, len(source), NATIVE.address_of(source) if len(source) else 0)
    BY_NAME["send"].packer.pack_into(half.upper.bodies[0], 0, BY_NAME["send"].number, *fields)
    (number,) = struct.unpack_from("<I", half.upper._view, 65536)
    struct.pack_into("<I", half.upper._view, 65536, number + 1)
    ring(half.upper)


@pytest.mark.parametrize("room", [None, 0, 50])
@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 9])
def test_a_short_synchronous_send_is_over_when_a_receive_has_matched(
    tmp_path: Path, room: int | None, near: bool, num_bytes: int
) -> None:
    sender, receiver = _two(tmp_path, near=near)
    source = bytearray(b"x" * num_bytes)
    _send(sender, source, 1, CallFlag.SYNCHRONOUS | CallFlag.BLOCKING)
    _both_turn(sender, receiver)
    assert sender.upper.pending() == 1
    target = None if room is None else memoryview(bytearray(room))
    _receive(receiver, target)
    _both_turn(sender, receiver)
    assert sender.upper.pending() == 0 and not sender.requests.by_number and not sender.engine.carrying
    assert _landed(receiver, target) == source[:room]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("num_bytes", "flags"), [(9, CallFlag.SYNCHRONOUS), (0, CallFlag.SYNCHRONOUS), (100_000, 0), (9, 0)]
)
def test_what_a_program_sends_to_itself_arrives(tmp_path: Path, num_bytes: int, flags: int, is_late: bool) -> None:
    half = _two(tmp_path)[0]
    source, target = bytearray(os.urandom(num_bytes)), memoryview(bytearray(num_bytes))
    steps = [lambda: _send(half, source, 0, flags), lambda: _receive(half, target, source=0)]
    for step in reversed(steps) if is_late else steps:
        step()
        half.turn()
    assert _landed(half, target) == source and not half.sent
    assert all(request.done for request in half.requests.by_number.values())


def test_what_many_have_given_up_is_taken_from_mpi_little_at_a_time(tmp_path: Path) -> None:
    sender, receiver = _two(tmp_path, near=False)
    for _ in range(4):
        _send_long(sender, bytearray(_PIECE_BYTES), waits=False)
        sender.turn()
    receiver.coming.extend(sender.sent)
    sender.sent.clear()
    receiver.turn()
    assert len(receiver.pieces) == 4 * _PIECES_AT_ONCE
    kept, receiver.pieces = list(receiver.pieces), type(receiver.pieces)()
    for message in receiver.matching.arrived:
        receiver.engine.discard(message)
    receiver.turn()
    assert len(receiver.awaited) == _PIECES_AT_ONCE and receiver.engine.carrying
    receiver.pieces.extend(kept)
    receiver.turn()
    assert not receiver.pieces and not receiver.engine.carrying and not receiver.sent


@pytest.mark.parametrize(
    ("tag", "num_bytes", "piece_bytes"),
    [
        (15_000, 1, 1),
        (30_001, 1, 1),
        (1 << 40, 1, 1),
        (15_001, 0, 1),
        (15_001, 1, 0),
        (15_001, 3, 1),
        (15_001, 1 << 30, 1 << 29),
    ],
)
def test_what_is_given_up_is_checked(tmp_path: Path, tag: int, num_bytes: int, piece_bytes: int) -> None:
    half = _two(tmp_path, near=False)[0]
    half.coming.append(HEADER.pack(7, piece_bytes, What.GIVEN_UP, 0, 1, 0, 0, tag, num_bytes))
    with pytest.raises(ValueError, match="rank 1 sends"):
        half.turn()


@pytest.mark.parametrize("what", [What.HELPED, What.LOCKED, 77, -1])
def test_what_fits_nothing_is_refused(tmp_path: Path, what: int) -> None:
    half = _two(tmp_path)[0]
    _receive_long(half, bytearray(40_000))
    half.turn()
    half.coming.append(HEADER.pack(7, 0, what, 0, 1, 0, FIRST_POSTED, 1, 0))
    with pytest.raises(ValueError, match="hearing rank 1: .*run one version of remesh"):
        half.turn()
