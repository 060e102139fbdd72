"""Small collectives as messages of ours, under any order of entering and hearing."""

from __future__ import annotations

import ctypes
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from remesh.carried.mpi.calls.error_classes import CLASSES
from remesh.carried.mpi.calls.table import BY_NAME, COMPLETION, REQUEST_REPLY, CallFlag, Kind
from remesh.carried.mpi.calls.wire_messages import HEADER, What
from remesh.carried.mpi.channel import SharedChannel
from remesh.carried.mpi.lower.exchange_pattern import SMALL_BYTES, pack_plan, plan_small
from remesh.carried.mpi.lower.matching import Matching
from remesh.carried.mpi.lower.numbered import Numbered
from remesh.carried.mpi.lower.requests import Requests
from remesh.carried.mpi.native import NATIVE
from tests.unit.carried.mpi.fake_mpi import PromptMpi, make_setup, ring

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


class _Member:
    """A rank on a make-believe MPI."""

    def __init__(self, rank: int, size: int, folder: Path, *, fails: bool = False) -> None:
        self.requests, self._mpi = Requests(), PromptMpi(self._reduce)
        self.sent = self._mpi.sent
        self._rank, self._size, self._fails = rank, size, fails
        self._plans = Numbered[bytes]()
        self._channel = SharedChannel.create(str(folder / f"channel-{rank}"))
        callbacks = ("on_message", "serve", "tell", "tell_wait")
        self.started: dict[int, Any] = {}
        self._engine = NATIVE.Engine(
            make_setup(
                self._channel,
                self.requests,
                Matching(Numbered),
                self._mpi.frame,
                self._mpi.functions,
                ops=(3,),
                types=(4,),
                extents=(8,),
                rank=rank,
                size=size,
                plans=Numbered({_COMM: self._plans}),
                make_plan=self._make_plan,
                small_bytes=SMALL_BYTES,
                neighbours=bytes(size),
                **dict.fromkeys(callbacks, self._unexpected),
            )
        )

    def _make_plan(self, comm: int, kind: int, root: int) -> None:
        assert comm == _COMM
        steps = plan_small(Kind(kind), range(self._size), self._rank, root)
        self._plans[kind << 32 | root] = pack_plan(self._size, steps)

    def _unexpected(self, *what: Any) -> None:
        raise AssertionError(what)

    def _reduce(self, before: int, after: int, count: int, datatype: int, op: int) -> int:
        assert (count, datatype, op) == (1, 4, 3)
        words = (ctypes.c_uint64.from_address(place) for place in (before, after))
        one, other = words
        other.value = _mix(one.value, other.value)
        return 15 if self._fails else 0

    def start(self, clock: int, operand: bytes) -> Any:
        """Enter one without waiting for it; its request."""
        return self.start_kind(clock, Kind.ALLREDUCE if operand else Kind.BARRIER, 0, operand, len(operand))

    def start_kind(self, clock: int, kind: Kind, root: int, operand: bytes, receive_bytes: int) -> Any:
        """The same, of any kind."""
        call, num_bytes = BY_NAME["collective"], len(operand)
        fields = (CallFlag.INLINE, kind, 0, 0, _COMM, root, 0, num_bytes, 0, receive_bytes, 0)
        body, before = self._channel.bodies[clock], set(self.requests.by_number)
        call.packer.pack_into(body, 0, call.number, *fields)
        body[call.packer.size : call.packer.size + num_bytes] = operand
        struct.pack_into("<I", self._channel._view, 65536 * (1 + clock), 1)
        ring(self._channel)
        self._turn()
        status, number, *_ = REQUEST_REPLY.unpack_from(body)
        assert status == 0
        if number:
            return self.requests.by_number[number]
        assert set(self.requests.by_number) == before
        _, _, message_bytes, error, _, _ = COMPLETION.unpack_from(body, REQUEST_REPLY.size)
        at = REQUEST_REPLY.size + COMPLETION.size
        return SimpleNamespace(done=True, error=error, payload=bytes(body[at : at + message_bytes]))

    def _turn(self) -> None:
        while self._engine.step(False):
            pass

    def hear(self, frame: bytes) -> None:
        self._mpi.coming.append(frame)
        self._turn()

    @property
    def inside(self) -> set[int]:
        return {self.requests.by_number[number].comm for number, *_ in self._engine.small}


def _run(members: list[Any], operands: list[list[bytes]], order: random.Random) -> list[list[Any]]:
    """All collectives of all members, entered and heard of in some order; messages between two keep theirs."""
    return _run_all(
        members, [lambda one, rank, row=row, at=at: one.start(at, row[rank]) for at, row in enumerate(operands)], order
    )


def _run_all(members: list[Any], begins: list[Any], order: random.Random) -> list[list[Any]]:
    """The same; each of ``begins`` enters one for a member and its rank."""
    started: list[list[Any]] = [[] for _ in members]
    while True:
        can = [("enter", r, r) for r in range(len(members)) if len(started[r]) < len(begins)]
        on_way = {(sender, dest) for sender, one in enumerate(members) for dest, _ in one.sent}
        can += [("hear", sender, dest) for sender, dest in sorted(on_way)]
        if not can:
            return started
        what, sender, dest = order.choice(can)
        if what == "enter":
            started[sender].append(begins[len(started[sender])](members[sender], sender))
        else:
            index = next(i for i, (to, _) in enumerate(members[sender].sent) if to == dest)
            _, frame = members[sender].sent[index]
            del members[sender].sent[index]
            members[dest].hear(frame)


@given(
    st.integers(1, 9),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_all_ranks_get_the_same_fold(
    tmp_path_factory: pytest.TempPathFactory, size: int, have_data: list[bool], order: random.Random
) -> None:
    """Several on one communicator, barriers and reductions, some of them begun before others are over."""
    folder = tmp_path_factory.mktemp("doubling")
    members = [_Member(rank, size, folder) for rank in range(size)]
    words = [[order.randrange(_MODULUS) for _ in range(size)] for _ in have_data]
    operands = [[_WORD.pack(word) if data else b"" for word in row] for data, row in zip(have_data, words, strict=True)]
    for requests in _run(members, operands, order):
        for request, data, row in zip(requests, have_data, words, strict=True):
            assert request.done and not request.error
            assert bytes(request.payload) == (_WORD.pack(_fold_of(row)) if data else b"")
    assert [one.inside for one in members] == [set()] * size


def test_nobody_is_through_a_barrier_before_all_have_come(tmp_path: Path) -> None:
    members = [_Member(rank, 3, tmp_path) for rank in range(3)]
    requests = [members[rank].start(0, b"") for rank in (0, 2)]
    while any(one.sent for one in members):
        for one in members:
            while one.sent:
                dest, frame = one.sent.popleft()
                members[dest].hear(frame)
    assert not any(request.done for request in requests)
    assert members[0].inside == {_COMM}


def test_operands_of_two_sizes_are_an_error_on_both_sides(tmp_path: Path) -> None:
    members = [_Member(rank, 2, tmp_path) for rank in range(2)]
    for requests in _run(members, [[bytes(8), bytes(16)]], random.Random(1)):
        assert requests[0].done and requests[0].error == CLASSES["ERR_TRUNCATE"]


def test_a_fold_that_fails_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    """Of five ranks the first only takes the result: what the others met is told with it."""
    members = [_Member(rank, 5, tmp_path, fails=rank == 1) for rank in range(5)]
    for requests in _run(members, [[_WORD.pack(rank) for rank in range(5)]], random.Random(2)):
        assert requests[0].done and requests[0].error == CLASSES["ERR_OP"]


def test_a_part_of_impossible_size_is_refused(tmp_path: Path) -> None:
    member = _Member(0, 2, tmp_path)
    with pytest.raises(ValueError, match="a part of 1099511627776 bytes from rank 1"):
        member.hear(HEADER.pack(_COMM, 0, What.PART, 0, 1, 0, 0, 1 << 40, 0))


@dataclass(frozen=True)
class _Rooted:
    """One collective: the word of each rank, of which the root's is what a Bcast tells."""

    clock: int
    kind: Kind
    root: int
    words: list[bytes]

    def begin(self, member: _Member, rank: int) -> Any:
        is_root, word, size = rank == self.root, self.words[rank], len(self.words)
        operand, num_bytes = {
            Kind.BCAST: (word, 0) if is_root else (b"", 8),
            Kind.SCATTER: (b"".join(self.words) if is_root else b"", 8),
            Kind.GATHER: (word, 8 * size if is_root else 0),
            Kind.REDUCE: (word, 8 if is_root else 0),
        }.get(self.kind, (word, 8))
        return member.start_kind(self.clock, self.kind, self.root, operand, num_bytes)

    def expected(self, rank: int) -> bytes | None:
        """What a rank gets; None where that depends on the order of folding."""
        is_root, whole = rank == self.root, b"".join(self.words)
        told: dict[Kind, bytes | None] = {
            Kind.BCAST: b"" if is_root else self.words[self.root],
            Kind.SCATTER: self.words[rank],
            Kind.GATHER: whole if is_root else b"",
            Kind.REDUCE: None if is_root else b"",
            Kind.EXSCAN: self.words[0] if rank == 1 else None,
        }
        return told.get(self.kind)


_ROOTED = (Kind.BCAST, Kind.SCATTER, Kind.GATHER, Kind.REDUCE, Kind.SCAN, Kind.EXSCAN)


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(_ROOTED), st.integers(0, 5)), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_with_a_root_or_a_scan_each_gets_its_own_though_some_run_far_ahead(
    tmp_path_factory: pytest.TempPathFactory, size: int, asked: list[tuple[Kind, int]], order: random.Random
) -> None:
    folder = tmp_path_factory.mktemp("rooted")
    members = [_Member(rank, size, folder) for rank in range(size)]
    all_of_them = [
        _Rooted(clock, kind, root % size, [_WORD.pack(order.randrange(_MODULUS)) for _ in range(size)])
        for clock, (kind, root) in enumerate(asked)
    ]
    for rank, requests in enumerate(_run_all(members, [one.begin for one in all_of_them], order)):
        for request, one in zip(requests, all_of_them, strict=True):
            assert request.done and not request.error
            expected = one.expected(rank)
            assert expected is None or bytes(request.payload or b"") == expected


def test_a_root_is_through_though_nobody_else_has_come(tmp_path: Path) -> None:
    members = [_Member(rank, 4, tmp_path) for rank in range(4)]
    all_of_them = [_Rooted(clock, Kind.BCAST, 0, [_WORD.pack(clock)] * 4) for clock in range(9)]
    assert all(one.begin(members[0], 0).done for one in all_of_them)
    while members[0].sent:
        dest, frame = members[0].sent.popleft()
        members[dest].hear(frame)
    # Its eldest child has all that there is; it gives that on when it comes.
    assert not members[2].sent
    assert [bytes(one.begin(members[2], 2).payload) for one in all_of_them] == [_WORD.pack(clock) for clock in range(9)]
    assert {dest for dest, _ in members[2].sent} == {3}


def test_what_does_not_fit_together_is_an_error_of_who_gets_it(tmp_path: Path) -> None:
    members = [_Member(rank, 2, tmp_path) for rank in range(2)]
    members[0].start_kind(0, Kind.SCATTER, 0, bytes(24), 8)
    for dest, frame in members[0].sent:
        members[dest].hear(frame)
    assert members[1].start_kind(0, Kind.SCATTER, 0, b"", 8).error == CLASSES["ERR_TRUNCATE"]
