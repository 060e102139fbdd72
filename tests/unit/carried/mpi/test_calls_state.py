"""The state of a lower half comes back as it was, and damage is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from remesh.carried.mpi.calls.table import Kind
from remesh.carried.mpi.lower import state
from remesh.carried.mpi.lower.exposure import Asker, Exposure, Locks
from remesh.carried.mpi.lower.open_collectives import OpenCollective
from remesh.carried.mpi.lower.records import Arrived, Operation, Posted
from remesh.carried.mpi.lower.requests import RECEIVE, SEND
from remesh.carried.mpi.lower.stand_ins import CallShape
from remesh.foundation.checksums import crc32
from remesh.foundation.errors import FormatError


def _parts(payload: bytes) -> state.HalfState:
    return state.HalfState(
        rank=1,
        size=3,
        next_numbers={"request": 9, "message": 2, "parcel": 5},
        requests=[
            Operation(3, SEND, 7, 2, 5, 0x7000_0000_0000, 1 << 33),
            Operation(4, RECEIVE, 7, -1, -1, 0, -1, done=True, source=0, message_bytes=len(payload), payload=payload),
        ],
        posted=[Posted(5, 1 << 61, 2, -1)],
        arrived=[Arrived(7, 0, 1, len(payload), payload, 0), Arrived(7, 2, 1, 1 << 40, None, 8)],
        messages={1: Arrived(7, 0, 2, 0, b"", 0)},
        owed=[(6, 11)],
        parcels={2: payload},
        members={0: (0, 1, 2), 1 << 61: (1, 2)},
        entered={0: 12},
        made=[1 << 61],
        open=[
            OpenCollective(4, 0, 12, CallShape(Kind.BCAST, 2, 0, 0, 0, 1 << 33), 0, b""),
            OpenCollective(5, 0, 11, CallShape(Kind.GATHERV, 1, 0, 0, len(payload), 9, (), (4, 5, 0)), 0, payload),
            OpenCollective(6, 1 << 61, 1, CallShape(Kind.ALLREDUCE, 0, 1, 2, 1 << 33, 1 << 33), 0x7000_0000, None),
        ],
        small=[state.SmallCollective(7, 3, Kind.GATHER, 2, 1, 2, 9, 8, payload)],
        parts=[state.KeptPart(0, 5, 2, 15, payload)],
        windows={
            9: Exposure(4096, {4096: 80}, Locks([Asker(2, True, 7)], [Asker(0, False, 3)])),
            1 << 60: Exposure(0, {1 << 40: 8, 1 << 41: 0}, Locks([Asker(0, False, 1), Asker(1, False, 2)])),
        },
        attached={3: (4_000_000_000, 4)},
        finished=False,
    )


@given(st.binary(max_size=50))
def test_every_part_comes_back(payload: bytes) -> None:
    parts = _parts(payload)
    assert state.load(state.save(parts), rank=1, size=3) == parts


@given(st.binary(max_size=50))
def test_small_collectives_of_an_earlier_version_come_back(payload: bytes) -> None:
    """All were of one kind, and what was done of a plan was counted in bytes, eight to a step."""
    records, payloads = state.unpack(state.save(replace(_parts(payload), small=[])))
    place = records["parts"][0][-1]
    records["small"] = [[7, 3, 1, 2, 24, place]]
    earlier = b"RMSHLOW2" + state.pack(records, [payloads])[8:-4]
    found = state.load(earlier + crc32(earlier).to_bytes(4, "little"), rank=1, size=3)
    assert found.small == [state.SmallCollective(7, 3, Kind.ALLREDUCE, 0, 1, 2, len(payload), 3, payload)]


def test_kinds_of_requests_are_the_words_themselves_since_the_engine_compares_no_letters() -> None:
    parts = state.load(state.save(_parts(b"")), rank=1, size=3)
    for request, kind in zip(parts.requests, (SEND, RECEIVE), strict=True):
        assert request.kind is kind
    wrong = replace(parts, requests=[Operation(3, "sent", 7, 2, 5, 0, 0)])
    with pytest.raises(FormatError, match="'sent'"):
        state.load(state.save(wrong), rank=1, size=3)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_noticed(position: int, change: int) -> None:
    data = bytearray(state.save(_parts(b"payload")))
    data[position % len(data)] ^= change
    with pytest.raises(FormatError):
        state.load(bytes(data), rank=1, size=3)


@given(st.integers(0, 400))
def test_a_shorter_file_is_noticed(length: int) -> None:
    with pytest.raises(FormatError):
        state.load(state.save(_parts(b"payload"))[:length], rank=1, size=3)


@pytest.mark.parametrize(("address", "send"), [(0, None), (4096, b"payload"), (0, b"payloa")])
def test_an_operand_is_in_one_place_and_whole(address: int, send: bytes | None) -> None:
    shape = CallShape(Kind.BCAST, 0, 0, 0, 7, 0)
    wrong = replace(_parts(b""), open=[OpenCollective(4, 0, 12, shape, address, send)])
    with pytest.raises(FormatError, match="operand of 7 bytes"):
        state.load(state.save(wrong), rank=1, size=3)


def test_another_rank_is_told_so() -> None:
    with pytest.raises(FormatError, match=r"rank 1 of 3, expected 0 of 3") as caught:
        state.load(state.save(_parts(b"")), rank=0, size=3)
    assert caught.value.reason == "other-rank"
