"""What an engine sends before it is wanted: it saves a handshake, and at a checkpoint it is as if it had never been."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from remesh.carried.mpi.calls.table import FIRST_POSTED
from remesh.carried.mpi.calls.wire_messages import HEADER, What
from remesh.carried.mpi.native import NATIVE
from tests.unit.carried.mpi.test_calls_engine import (
    _PIECE_BYTES,
    _both_turn,
    _Half,
    _receive_long,
    _send_long,
    _two,
)

_MOST_AHEAD = 4
_FIRST_TAG, _LAST_TAG = 15_001, 30_000
"""Of senders."""


def _close(half: _Half) -> None:
    """As a lower half does: what has come ahead of messages that no receive has is declined."""
    half.engine.set(True, 0)
    for message in half.matching.arrived:
        if message.ahead:
            half.engine.decline(message)


def _open(half: _Half) -> None:
    """And what was matched while closed is asked for."""
    half.engine.set(False, 0)
    owed = list(half.owed)
    half.owed.clear()
    for pair in owed:
        half.engine.match(*pair)


def _announcements(half: _Half) -> list[tuple[Any, ...]]:
    """Kind, tag of what is ahead, bytes of each announcement that it has sent."""
    frames = [HEADER.unpack_from(frame) for frame in half.said]
    kinds = (What.ANNOUNCED, What.ANNOUNCED_AHEAD, What.ANNOUNCED_AHEAD_WHOLE)
    return [(frame[2], frame[5], frame[7]) for frame in frames if frame[2] in kinds]


@pytest.mark.parametrize("num_bytes", [40_000, _PIECE_BYTES, 5 * _PIECE_BYTES + 1])
@pytest.mark.parametrize("has_receive", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_ranks_that_close_leave_nothing_in_mpi_and_the_payload_with_its_sender(
    tmp_path: Path, num_bytes: int, has_receive: bool, is_known: bool, is_shared: bool
) -> None:
    """``is_known``: the announcement has come when they close; if not, it may match a receive that has been posted."""
    source, target = bytearray(os.urandom(num_bytes)), bytearray(num_bytes)
    arena = (NATIVE.address_of(source), num_bytes) if is_shared else (0, 0)
    sender, receiver = _two(tmp_path, arena, near=False)
    _send_long(sender, source, waits=False)
    sender.turn()
    if is_known:
        _both_turn(sender, receiver)
    elif has_receive:
        _receive_long(receiver, target)
        receiver.turn()
    assert sender.engine.carrying and receiver.pieces
    for half in (receiver, sender):
        _close(half)
    _both_turn(sender, receiver)
    assert not sender.engine.carrying and not receiver.engine.carrying
    assert not receiver.pieces and len(receiver.awaited) == (1 if is_shared or num_bytes <= _PIECE_BYTES // 2 else 2)
    assert [request.done for request in sender.requests.by_number.values()] == [False]
    assert all(message.ahead == 0 for message in receiver.matching.arrived)
    source[:100] = os.urandom(100)
    for half in (sender, receiver):
        _open(half)
    if is_known or not has_receive:
        _receive_long(receiver, target)
    _both_turn(sender, receiver)
    assert target == source, "what was thrown away counts for nothing, not even for its bytes"
    assert [request.done for request in sender.requests.by_number.values()] == [True]
    assert receiver.num_said(What.WANTED) == 1


def test_a_round_that_is_given_up_at_once_asks_for_all_of_what_was_declined(tmp_path: Path) -> None:
    """The receiver opens, and matches, before its sender has heard that it declines."""
    source, target = bytearray(os.urandom(3 * _PIECE_BYTES)), bytearray(3 * _PIECE_BYTES)
    sender, receiver = _two(tmp_path, near=False)
    _send_long(sender, source, waits=True)
    _both_turn(sender, receiver)
    _close(receiver)
    _open(receiver)
    _receive_long(receiver, target)
    _both_turn(sender, receiver)
    assert target == source and sender.num_said(What.GIVEN_UP) == 1 and not receiver.pieces
    assert not sender.engine.carrying and sender.upper.pending() == 0


def test_few_payloads_are_ahead_at_a_time_and_others_when_those_are_received(tmp_path: Path) -> None:
    sender, receiver = _two(tmp_path, near=False)
    sources = [bytearray(os.urandom(40_000 + number)) for number in range(_MOST_AHEAD + 2)]
    targets = [bytearray(len(source)) for source in sources]
    for source in sources:
        _send_long(sender, source, waits=False)
        _both_turn(sender, receiver)
    told = _announcements(sender)
    assert [what for what, _, _ in told] == [What.ANNOUNCED_AHEAD] * _MOST_AHEAD + [What.ANNOUNCED] * 2
    tags = [tag for what, tag, _ in told if what == What.ANNOUNCED_AHEAD]
    assert len(set(tags)) == _MOST_AHEAD and all(_FIRST_TAG <= tag <= _LAST_TAG for tag in tags)
    for number, target in enumerate(targets):
        _receive_long(receiver, target, FIRST_POSTED + number)
        _both_turn(sender, receiver)
    assert targets == sources
    _send_long(sender, sources[0], waits=False)
    sender.turn()
    assert _announcements(sender)[-1][0] == What.ANNOUNCED_AHEAD


def test_no_two_payloads_are_ahead_with_one_tag_however_long_one_stays(tmp_path: Path) -> None:
    sender, receiver = _two(tmp_path, near=False)
    staying, other = bytearray(40_000), bytearray(40_000)
    _send_long(sender, staying, waits=False)
    sender.turn()
    stays = sender.untaken.copy()
    tags = {_announcements(sender)[0][1]}
    for _ in range(_LAST_TAG - _FIRST_TAG + 1):
        sender.said.clear()
        _send_long(sender, other, waits=False)
        sender.turn()
        ((what, tag, _),) = _announcements(sender)
        assert what == What.ANNOUNCED_AHEAD and _FIRST_TAG <= tag <= _LAST_TAG
        tags.add(tag)
        receiver.pieces.pop()
        sender.untaken &= stays
        sender.turn()
    assert sender.engine.carrying and tag != 15_002 and len(tags) == _LAST_TAG - _FIRST_TAG + 1


def test_programs_that_leave_take_from_mpi_what_nobody_has_received(tmp_path: Path) -> None:
    sender, receiver = _two(tmp_path, near=False)
    source = bytearray(2 * _PIECE_BYTES)
    _send_long(sender, source, waits=False)
    _both_turn(sender, receiver)
    sender.engine.give_up_ahead()
    receiver.pieces.clear()
    sender.untaken.clear()
    sender.turn()
    assert not sender.engine.carrying


@pytest.mark.parametrize("waits", [False, True])
def test_a_payload_that_nobody_receives_does_not_keep_its_lower_half_awake(tmp_path: Path, waits: bool) -> None:
    sender, receiver = _two(tmp_path, near=False)
    _send_long(sender, bytearray(40_000), waits=waits)
    _both_turn(sender, receiver)
    assert sender.engine.carrying
    before = sender.num_asked
    sender.engine.run(50_000, [])
    # Each look asks twice, and between two of them it sleeps, at last for half a millisecond; awake it asks thousands
    # of times.
    assert 2 <= sender.num_asked - before < 800


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ((7, 3, What.ANNOUNCED_AHEAD, 5, 40_000, 15_000, 0), "tag 15000"),
        ((7, 3, What.ANNOUNCED_AHEAD_WHOLE, 5, 40_000, 30_001, 0), "tag 30001"),
        ((7, 3, What.ANNOUNCED_AHEAD, 5, 0, 15_001, 0), "0 bytes"),
        ((7, 40_000, What.WANTED, 1, 9, 0, _PIECE_BYTES), "40000 on, and 131072 of 300000"),
        ((7, 0, What.WANTED, 1, 9, 0, _PIECE_BYTES), "0 on, and 131072 of 300000"),
        ((7, 0, What.DECLINED, 2, 15_001, 0, 0), "declines"),
    ],
)
def test_what_others_say_of_pieces_ahead_is_checked(tmp_path: Path, fields: tuple[int, ...], said: str) -> None:
    """Request 1 of the rank is a send with a piece ahead, request 2 one without."""
    half, _ = _two(tmp_path, near=False)
    source = bytearray(300_000)
    for _ in range(_MOST_AHEAD + 1):
        _send_long(half, source, waits=False)
        half.turn()
    if fields[2] == What.DECLINED:
        fields = (*fields[:3], _MOST_AHEAD + 1, *fields[4:])
    comm, tag, what, request, num_bytes, pid, address = fields
    half.coming.append(HEADER.pack(comm, tag, what, 0, 1, pid, request, num_bytes, address))
    with pytest.raises(ValueError, match=said):
        half.turn()
