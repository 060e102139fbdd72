"""Small collectives as messages of ours: the engine in C and the Python parts do the same, and with each other."""

from __future__ import annotations

import ctypes
import random
import struct
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remesh.mpi.calls.error_classes import CLASSES
from remesh.mpi.channel import Channel
from remesh.mpi.lower.doubling import Doublings, Fold, pack_plan
from remesh.mpi.lower.matching import Matching
from remesh.mpi.lower.records import Request
from remesh.mpi.lower.requests import COLLECTIVE, Requests
from remesh.mpi.lower.wire import HEADER, What
from remesh.mpi.native import NATIVE
from tests.unit.mpi.make_believe_mpi import PromptMpi, make_setup, pack_frame, unpack_frame

_COMM, _MODULUS = 7, 1 << 64
_WORD = struct.Struct("<Q")


def _mix(before: int, after: int) -> int:
    """Neither commutative nor associative: tells every order of folding from every other."""
    return (before * 31 + after * 17 + 5) % _MODULUS


def _fold_of(operands: list[int]) -> int:
    power = 1 << (len(operands).bit_length() - 1)
    extra = len(operands) - power
    blocks = [_mix(*operands[2 * i : 2 * i + 2]) for i in range(extra)] + operands[2 * extra :]
    while len(blocks) > 1:
        blocks = [_mix(*pair) for pair in zip(blocks[::2], blocks[1::2], strict=True)]
    return blocks[0]


class _RealError(Exception):
    """Of the make-believe MPI."""


class _Real:
    """A datatype and an operation of the make-believe MPI."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    def Reduce_local(self, before: list[Any], after: list[Any]) -> None:
        if self._fails:
            raise _RealError
        _WORD.pack_into(after[0], 0, _mix(*_WORD.unpack(before[0]), *_WORD.unpack(after[0])))


class _InPython:
    """A rank whose lower half has no engine."""

    def __init__(self, rank: int, size: int, folder: Path, *, fails: bool = False) -> None:
        self.rank, self.sent = rank, deque[tuple[int, bytes]]()
        self.requests = Requests(Request)
        self._plan = pack_plan(range(size), rank)
        self._fold = Fold(_Real(fails=fails), None)
        self._doublings = Doublings(_RealError, self, self.requests)  # type: ignore[arg-type]  # its wire

    def send(self, dest: int, fields: tuple[int, ...], payload: bytes) -> None:
        self.sent.append((dest, pack_frame(self.rank, fields, payload)))

    def start(self, clock: int, operand: bytes) -> Request:
        request = self.requests.start(kind=COLLECTIVE, comm=_COMM, peer=0, tag=0, address=0, num_bytes=len(operand))
        self._doublings.start(request, clock, self._plan, self._fold if operand else Fold(), operand)
        return request

    def hear(self, frame: bytes) -> None:
        self._doublings.on_part(*unpack_frame(frame))

    @property
    def inside(self) -> set[int]:
        return self._doublings.inside


class _InC:
    """A rank with an engine on a make-believe MPI."""

    def __init__(self, rank: int, size: int, folder: Path, *, fails: bool = False) -> None:
        self.requests, self._mpi = Requests(Request), PromptMpi(self._reduce)
        self.sent = self._mpi.sent
        self._plan, self._fails = pack_plan(range(size), rank), fails
        self._channel = Channel.create(str(folder / f"channel-{rank}"))
        callbacks = ("on_message", "on_match", "on_refused", "serve", "tell", "tell_wait")
        self._engine = NATIVE.Engine(
            make_setup(
                self._channel,
                self.requests,
                Matching(),
                self._mpi.frame,
                self._mpi.functions,
                ops=(3,),
                types=(4,),
                extents=(8,),
                rank=rank,
                size=size,
                plans={_COMM: self._plan},
                neighbours=bytes(size),
                **dict.fromkeys(callbacks, self._unexpected),
            )
        )

    def _unexpected(self, *what: Any) -> None:
        raise AssertionError(what)

    def _reduce(self, before: int, after: int, count: int, datatype: int, op: int) -> int:
        assert (count, datatype, op) == (1, 4, 3)
        words = (ctypes.c_uint64.from_address(place) for place in (before, after))
        one, other = words
        other.value = _mix(one.value, other.value)
        return 15 if self._fails else 0

    def start(self, clock: int, operand: bytes) -> Request:
        request = self.requests.start(kind=COLLECTIVE, comm=_COMM, peer=0, tag=0, address=0, num_bytes=len(operand))
        self._engine.double(request, clock, self._plan, 0, 0, operand)
        return request

    def hear(self, frame: bytes) -> None:
        self._mpi.coming.append(frame)
        while self._engine.step(False):
            pass

    @property
    def inside(self) -> set[int]:
        return set(self._engine.inside)


_WAYS: list[Any] = [_InPython] if NATIVE.Engine is None else [_InPython, _InC]


def _run(members: list[Any], operands: list[list[bytes]], order: random.Random) -> list[list[Request]]:
    """All collectives of all members, entered and heard of in some order; messages between two keep theirs."""
    started: list[list[Request]] = [[] for _ in members]
    while True:
        can = [("enter", r, r) for r in range(len(members)) if len(started[r]) < len(operands)]
        on_way = {(sender, dest) for sender, one in enumerate(members) for dest, _ in one.sent}
        can += [("hear", sender, dest) for sender, dest in sorted(on_way)]
        if not can:
            return started
        what, sender, dest = order.choice(can)
        if what == "enter":
            clock = len(started[sender])
            started[sender].append(members[sender].start(clock, operands[clock][sender]))
        else:
            index = next(i for i, (to, _) in enumerate(members[sender].sent) if to == dest)
            _, frame = members[sender].sent[index]
            del members[sender].sent[index]
            members[dest].hear(frame)


@given(
    st.lists(st.sampled_from(_WAYS), min_size=1, max_size=9),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_all_ranks_get_the_same_fold_whether_in_c_or_in_python(
    tmp_path_factory: pytest.TempPathFactory, ways: list[Any], have_data: list[bool], order: random.Random
) -> None:
    """Several on one communicator, barriers and reductions, some of them begun before others are over."""
    folder, size = tmp_path_factory.mktemp("doubling"), len(ways)
    members = [way(rank, size, folder) for rank, way in enumerate(ways)]
    words = [[order.randrange(_MODULUS) for _ in ways] for _ in have_data]
    operands = [[_WORD.pack(word) if data else b"" for word in row] for data, row in zip(have_data, words, strict=True)]
    for requests in _run(members, operands, order):
        for request, data, row in zip(requests, have_data, words, strict=True):
            assert request.done and not request.error
            assert bytes(request.payload) == (_WORD.pack(_fold_of(row)) if data else b"")
    assert [one.inside for one in members] == [set()] * size


@pytest.mark.parametrize("way", _WAYS)
def test_nobody_is_through_a_barrier_before_all_have_come(tmp_path: Path, way: Any) -> None:
    members = [way(rank, 3, tmp_path) for rank in range(3)]
    requests = [members[rank].start(0, b"") for rank in (0, 2)]
    while any(one.sent for one in members):
        for one in members:
            while one.sent:
                dest, frame = one.sent.popleft()
                members[dest].hear(frame)
    assert not any(request.done for request in requests)
    assert members[0].inside == {_COMM}


@pytest.mark.parametrize("ways", [[one, other] for one in _WAYS for other in _WAYS])
def test_operands_of_two_sizes_are_an_error_on_both_sides(tmp_path: Path, ways: list[Any]) -> None:
    members = [way(rank, 2, tmp_path) for rank, way in enumerate(ways)]
    for requests in _run(members, [[bytes(8), bytes(16)]], random.Random(1)):
        assert requests[0].done and requests[0].error == CLASSES["ERR_TRUNCATE"]


@pytest.mark.parametrize("way", _WAYS)
def test_a_fold_that_fails_is_an_error_of_all_ranks(tmp_path: Path, way: Any) -> None:
    """Of five ranks the first only takes the result: what the others met is told with it."""
    members = [way(rank, 5, tmp_path, fails=rank == 1) for rank in range(5)]
    for requests in _run(members, [[_WORD.pack(rank) for rank in range(5)]], random.Random(2)):
        assert requests[0].done and requests[0].error == CLASSES["ERR_OP"]


@pytest.mark.skipif(NATIVE.Engine is None, reason="the C extension is not built")
def test_a_part_of_impossible_size_is_refused(tmp_path: Path) -> None:
    member = _InC(0, 2, tmp_path)
    with pytest.raises(ValueError, match="a part of 1099511627776 bytes from rank 1"):
        member.hear(HEADER.pack(_COMM, 0, What.PART, 1, 0, 0, 1 << 40, 0))
