"""What does not fit, in the channel or on the wire, ends the lower half with its name: nothing beyond it is touched."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from remesh.carried.mpi.calls.error_classes import CLASSES
from remesh.carried.mpi.calls.table import (
    BY_NAME,
    COMPLETION,
    EAGER_BYTES,
    FIRST_POSTED,
    INDEX,
    WAIT_REPLY,
    CallFlag,
    Kind,
    PayloadPlace,
    WaitFor,
)
from remesh.carried.mpi.calls.wire_messages import HEADER, What
from remesh.carried.mpi.calls.words import NUM_SLOTS
from remesh.carried.mpi.channel import SharedChannel
from remesh.carried.mpi.lower.matching import Matching
from remesh.carried.mpi.lower.numbered import Numbered
from remesh.carried.mpi.lower.requests import Requests
from remesh.carried.mpi.native import NATIVE
from tests.unit.carried.mpi.fake_mpi import (
    FRAME_REQUEST,
    AskType,
    PostedFrame,
    address_of,
    call_lower,
    make_setup,
    ring,
)
from tests.unit.carried.mpi.program_side import Port
from tests.unit.carried.mpi.test_calls_engine import _blocking, _Half

_SLOT = NUM_SLOTS - 1
"""The last one: behind its ring the mapping ends."""
_RING, _POSTED, _RING_BYTES = 49152, 192, 16384
_START = (1 << 16) * (1 + _SLOT)
_LARGEST_TAG = 15_000
"""Of streams that a receiver names."""


_Fold = ctypes.CFUNCTYPE(
    ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_int, *[ctypes.c_size_t] * 3, ctypes.POINTER(ctypes.c_uint64)
)


def _is_over(handle: Any, flag: Any, status: int) -> int:
    flag[0] = handle[0] != FRAME_REQUEST
    return 0


def _put(half: _Half, at: int, entry: bytes, posted: int) -> None:
    """Write into the ring of the last slot what a program that has lost its way could have written."""
    view = half.upper._view
    view[_START + _RING + at : _START + _RING + at + len(entry)] = entry
    struct.pack_into("<I", view, _START + _POSTED, posted)
    struct.pack_into("<I", view, _START + _POSTED + 64, at)
    ring(half.upper)


def _send_entry(whole: int, num_bytes: int, dest: int = 1) -> bytes:
    return struct.pack("<I", whole) + BY_NAME["send"].packer.pack(5, CallFlag.INLINE, 7, dest, 0, num_bytes, 0)


def _receive_entry(whole: int, capacity: int, call: int = 16) -> bytes:
    return struct.pack("<I", whole) + BY_NAME["start_receive"].packer.pack(call, FIRST_POSTED, 7, 1, 0, capacity, 0)


@pytest.mark.parametrize(
    ("entry", "posted", "found"),
    [
        (_send_entry(40, EAGER_BYTES), 40, "a send of 32768 bytes in 2"),
        (_send_entry(40, 0, dest=2), 40, "a send to rank 2 of 2"),
        (_send_entry(40, -1), 40, "a send of -1 bytes"),
        (_receive_entry(48, -2), 48, "a receive of -2 bytes"),
        (_receive_entry(48, 8, call=77), 48, "call 77"),
        (_receive_entry(40, 8), 40, "call 16 in an entry of 40 bytes"),
        (_send_entry(0, 0), 40, "an entry of 0 bytes"),
        (_send_entry(44, 0), 88, "an entry of 44 bytes"),
        (_send_entry(40, 0), 32, "an entry of 40 bytes, and 32 to the end"),
        (_send_entry(40, 0), 36, "36 bytes in a ring"),
        (_send_entry(40, 0), _RING_BYTES + 8, "16392 bytes in a ring of 16384"),
        (struct.pack("<I", 0xFFFFFFFF), 8, "an entry of 4294967295 bytes, and 8 to the end"),
    ],
)
def test_a_damaged_ring_is_refused(tmp_path: Path, entry: bytes, posted: int, found: str) -> None:
    half = _Half(str(tmp_path / "channel"))
    _put(half, 0, entry, posted)
    with pytest.raises(ValueError, match=f"slot {_SLOT} of its channel is damaged: {found}"):
        half.turn()


def test_nothing_behind_the_last_ring_is_read(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"))
    at = _RING_BYTES - 40
    _put(half, at, _send_entry(40, EAGER_BYTES), at + 40)
    with pytest.raises(ValueError, match="is damaged"):
        half.turn()


def _announce_to_rank_1(half: _Half) -> int:
    """A send of 100,000 bytes by rank 0 that no receive has matched: its number."""
    call = BY_NAME["send"]
    call.packer.pack_into(half.upper.bodies[0], 0, call.number, 0, 7, 1, 0, 100_000, 4096)
    _blocking(half, lambda: call_lower(half.upper, 0))
    (number,) = half.requests.by_number
    return number


@pytest.mark.parametrize(
    ("what", "num_bytes", "found"),
    [
        (What.MESSAGE, EAGER_BYTES + 1, "bytes of a short message: 32769"),
        (What.MESSAGE, 2**64 - 1, "bytes of a short message: -1"),
        (What.ANNOUNCED, 2**63, "bytes of an announced message: -9223372036854775808"),
        (What.ANNOUNCED_WAITING, 2**64 - 5, "bytes of an announced message: -5"),
        (What.PART, EAGER_BYTES + 1, "a part of 32769 bytes"),
    ],
)
def test_a_message_of_no_size_is_refused(tmp_path: Path, what: int, num_bytes: int, found: str) -> None:
    half = _Half(str(tmp_path / "channel"))
    half.coming.append(HEADER.pack(7, 0, what, 0, 1, 0, 0, num_bytes, 0))
    with pytest.raises(ValueError, match=f"rank 1.*{found}|{found}.*rank 1"):
        half.turn()


@pytest.mark.parametrize("tag", [0, -1, _LARGEST_TAG + 1, 1 << 40])
def test_a_stream_with_a_tag_of_other_messages_is_refused(tmp_path: Path, tag: int) -> None:
    half = _Half(str(tmp_path / "channel"))
    number = _announce_to_rank_1(half)
    half.coming.append(HEADER.pack(7, 0, What.WANTED, 0, 1, 0, number, tag % 2**64, 4096))
    with pytest.raises(ValueError, match="hearing rank 1: tag of a stream"):
        half.turn()


@pytest.mark.parametrize("what", [What.WANTED, What.TAKEN, What.DECLINED])
@pytest.mark.parametrize("is_receive", [False, True])
def test_what_is_said_of_a_request_must_come_from_who_it_was_sent_to(
    tmp_path: Path, what: int, is_receive: bool
) -> None:
    half = _Half(str(tmp_path / "channel"))
    if is_receive:
        assert Port(half.upper, 0).start_receive(FIRST_POSTED, 7, 1, 0, 8, 4096)
        half.turn()
        number, source = FIRST_POSTED, 1
    else:
        number, source = _announce_to_rank_1(half), 0
    half.coming.append(HEADER.pack(7, 0, what, 0, source, 0, number, 1, 4096))
    with pytest.raises(ValueError, match=f"hearing rank {source}: .* request {number}, which fits nothing"):
        half.turn()
    assert not half.requests.by_number[number].done


def _wait(half: _Half, numbers: list[int]) -> list[tuple[Any, ...]]:
    """Index and completion of each that one ``wait`` tells of."""
    call, body = BY_NAME["wait"], half.upper.bodies[0]
    call.packer.pack_into(body, 0, call.number, CallFlag.BLOCKING, WaitFor.ALL, len(numbers))
    struct.pack_into(f"<{len(numbers)}Q", body, call.packer.size, *numbers)
    _blocking(half, lambda: call_lower(half.upper, 0))
    told, position = [], WAIT_REPLY.size
    for _ in range(WAIT_REPLY.unpack_from(body)[1]):
        (index,) = INDEX.unpack_from(body, position)
        source, _, num_bytes, error, where, _ = COMPLETION.unpack_from(body, position + INDEX.size)
        position += INDEX.size + COMPLETION.size
        data = bytes(body[position : position + num_bytes]) if where == PayloadPlace.INLINE else b""
        position += len(data)
        told.append((index, source, num_bytes, error, data))
    return told


def test_a_request_that_is_waited_for_twice_is_told_once(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"))
    assert Port(half.upper, 1).start_receive(FIRST_POSTED, 7, 1, 3, 8, 4096)
    half.arrive(3, b"abc")
    half.turn()
    unknown = (0, 0, CLASSES["ERR_REQUEST"], b"")
    assert _wait(half, [FIRST_POSTED] * 3) == [(0, 1, 3, 0, b"abc"), (1, *unknown), (2, *unknown)]
    assert not half.requests.by_number


def test_payloads_that_a_reply_has_no_room_for_are_written_into_their_buffers(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"))  # its `tell_wait`, of Python, tells nothing
    half.engine.attach(os.getpid())
    payloads = [bytes([number]) * (EAGER_BYTES - 6 + number) for number in range(1, 6)]
    buffers = [bytearray(EAGER_BYTES) for _ in payloads]
    numbers = [FIRST_POSTED + index for index in range(len(payloads))]
    for number, buffer in zip(numbers, buffers, strict=True):
        room = EAGER_BYTES - 4  # too little for the last three
        assert Port(half.upper, 1).start_receive(number, 7, 1, 3, room, NATIVE.address_of(buffer))
    for payload in payloads:
        half.arrive(3, payload)
    half.turn()
    told = _wait(half, numbers)
    assert [(index, num_bytes) for index, _, num_bytes, _, _ in told] == [*enumerate(map(len, payloads))]
    assert [error for *_, error, _ in told] == [0] * 2 + [CLASSES["ERR_TRUNCATE"]] * 3
    wanted = [payload[: EAGER_BYTES - 4] for payload in payloads]
    for index, (*_, data) in enumerate(told):
        assert (data or bytes(buffers[index][: len(wanted[index])])) == wanted[index]
        assert not any(buffers[index][len(wanted[index]) :])
    assert [bool(data) for *_, data in told] == [True] + [False] * 4
    assert not half.requests.by_number


@pytest.mark.parametrize(
    ("kind", "receive_bytes", "is_short"),
    [
        (Kind.ALLREDUCE, 8, True),
        (Kind.ALLREDUCE, 0, False),
        (Kind.ALLREDUCE, 4, False),
        (Kind.SCAN, 8, False),
        (Kind.EXSCAN, 8, False),
        (Kind.REDUCE, 8, False),
    ],
)
def test_a_reduction_without_room_for_its_result_or_that_may_end_early_is_left_to_python(
    tmp_path: Path, kind: Kind, receive_bytes: int, is_short: bool
) -> None:
    served: list[int] = []
    folded: list[int] = []

    def serve(slot: int) -> int:
        served.append(slot)
        return -1

    def start(*arguments: Any) -> int:
        folded.append(1)
        return 0

    keep = (AskType(_is_over), _Fold(start))
    test, fold = map(address_of, keep)
    channel, frame = SharedChannel.create(str(tmp_path / "channel")), PostedFrame()
    engine = NATIVE.Engine(
        make_setup(
            channel, Requests(), Matching(Numbered), frame, (0, test, 0, 0, 0, fold, 0, 0, 0, 0, 0),
            rank=0, size=2, ops=(1,), types=(1,), extents=(8,), reals=Numbered({7: (1, 2)}), neighbours=bytes(2),
            serve=serve,
        )
    )  # fmt: skip
    call = BY_NAME["collective"]
    fields = (CallFlag.INLINE, kind, 0, 0, 7, 0, 0, 8, 4096, receive_bytes, 0)
    call.packer.pack_into(channel.bodies[0], 0, call.number, *fields)
    struct.pack_into("<I", channel._view, 1 << 16, 1)
    ring(channel)
    engine.step(False)
    assert (folded, served) == (([1], []) if is_short else ([], [0]))
