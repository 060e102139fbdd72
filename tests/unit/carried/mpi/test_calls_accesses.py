"""Accesses to windows and their locks, against what they are by definition."""

from __future__ import annotations

import ctypes
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from remesh.carried.mpi.calls.error_classes import CLASSES
from remesh.carried.mpi.calls.table import ACCESS_OPS, BY_NAME, EAGER_BYTES, FIRST_POSTED, REAL_OPS, RUN
from remesh.carried.mpi.calls.wire_messages import HEADER, What
from remesh.carried.mpi.channel import SharedChannel
from remesh.carried.mpi.lower.accesses import COMPARE_AND_SWAP, NO_OP, Verb
from remesh.carried.mpi.lower.exposure import Asker, Exposure
from remesh.carried.mpi.lower.matching import Matching
from remesh.carried.mpi.lower.numbered import Numbered
from remesh.carried.mpi.lower.requests import Requests
from remesh.carried.mpi.lower.upper_memory import UpperMemory
from remesh.carried.mpi.lower.windows import Operands, Windows
from remesh.carried.mpi.native import NATIVE
from tests.unit.carried.mpi.fake_mpi import PromptMpi, make_setup, ring
from tests.unit.carried.mpi.oracles import DumbLock
from tests.unit.carried.mpi.program_side import Port

REPLACE = ACCESS_OPS.index("REPLACE")
_WINDOW, _GONE, _BYTES, _SIZE = 77, 78, 256, 3
_NOBODY = 1 << 22
"""A process id that no process has."""
_SUM, _MAX, _MINLOC, _MAXLOC = (REAL_OPS.index(name) for name in ("SUM", "MAX", "MINLOC", "MAXLOC"))
_BYTE, _INT64, _SHORT_INT = range(3)
"""Types of the make-believe MPI: those of one byte, of eight, and values with an index, which are not plain."""
_EXTENTS = (1, 8, 0)
_FAILS = REAL_OPS.index("PROD")
"""An operation that the make-believe MPI refuses."""


def _fold(op: int, unit: int, before: bytes, after: bytes) -> bytes:
    form = f"<{len(after) // unit}{ {1: 'B', 8: 'q'}[unit] }"
    pairs = zip(struct.unpack(form, before), struct.unpack(form, after), strict=True)
    if op == _MAX:
        return struct.pack(form, *(max(pair) for pair in pairs))
    return b"".join((sum(pair) % (1 << 8 * unit)).to_bytes(unit, "little") for pair in pairs)


class _RealError(Exception):
    """Of the make-believe MPI."""


class _Folder:
    """What an access leaves behind."""

    def fold(self, verb: Verb, old: bytearray, data: bytes) -> bytes:
        if verb.op == COMPARE_AND_SWAP:
            if len(data) != 2 * len(old):
                raise ValueError
            return data[: len(old)] if data[len(old) :] == old else bytes(old)
        if len(data) != len(old) or (verb.op < REPLACE and len(old) % (_EXTENTS[verb.type] or 6)):
            raise ValueError
        if verb.op == _FAILS:
            raise _RealError
        return bytes(data) if verb.op == REPLACE else _fold(verb.op, _EXTENTS[verb.type] or 1, bytes(data), bytes(old))


class _Rank:
    """A rank with an engine on a make-believe MPI, and the memory that it gives."""

    def __init__(self, rank: int, folder: Path, pair: str = "h") -> None:
        self.rank, self.num_in_python = rank, 0
        self.memory = bytearray(random.Random(rank).randbytes(2 * _BYTES))
        self.result = bytearray(_BYTES)
        self.requests = Requests()
        memory = UpperMemory()
        memory.attach(os.getpid())
        self.windows = Windows(self, memory, self.requests)  # type: ignore[arg-type]  # its wire
        self.base = NATIVE.address_of(self.memory)
        self.windows.windows[_WINDOW] = Exposure(self.base, {self.base: _BYTES})
        self._mpi = PromptMpi(self._reduce)
        self.sent = self._mpi.sent
        self._channel = SharedChannel.create(str(folder / f"channel-{rank}"))
        self.engine = NATIVE.Engine(
            make_setup(
                self._channel,
                self.requests,
                Matching(Numbered),
                self._mpi.frame,
                self._mpi.functions,
                ops=tuple(range(100, 100 + len(REAL_OPS))),
                types=(200, 201, 202),
                extents=_EXTENTS,
                pairs=(0, 0, ord(pair)),
                rank=rank,
                size=_SIZE,
                windows=self.windows.windows,
                accesses=self.windows.accesses,
                access_queues=self.windows.queues,
                neighbours=bytes(_SIZE),
                on_message=self._on_message,
                serve_posted=self._serve_posted,
            )
        )
        self.engine.attach(os.getpid())

    def send(self, dest: int, fields: tuple[int, ...], payload: bytes = b"") -> None:
        self.engine.send(dest, fields, payload)

    def fetched(self, number: int, num_bytes: int) -> tuple[int, bytes]:
        """Error class of an access that is over, and what it has fetched."""
        request = self.requests.by_number[number]
        assert request.done
        data = bytes(self.result[:num_bytes]) if request.payload is None else bytes(request.payload)
        return request.error, data

    def _reduce(self, before: int, after: int, count: int, datatype: int, op: int) -> int:
        if op - 100 == _FAILS:
            return 1
        unit = _EXTENTS[datatype - 200]
        operands = (ctypes.string_at(place, count * unit) for place in (before, after))
        ctypes.memmove(after, _fold(op - 100, unit, *operands), count * unit)
        return 0

    def _on_message(self, source: int, fields: tuple[Any, ...], payload: bytes) -> None:
        self.num_in_python += 1
        self.windows.hear_accessed(source, fields, payload)

    def _serve_posted(self, slot: int, call: bytes) -> None:
        self.num_in_python += 1
        _, number, op, kind, fetches, window, target, _, num_data, *run = struct.unpack_from("<BQBBBQiQIqq", call)
        data = call[52 : 52 + num_data]
        operands = Operands(window, target, data, num_data, NATIVE.address_of(self.result))
        self.windows.access(operands, Verb(op, kind, bool(fetches)), [(run[0], run[1])], 1, number=number)

    def start(self, number: int, verb: Verb, window: int, target: int, run: tuple[int, int], data: bytes) -> None:
        result = NATIVE.address_of(self.result)
        fields = (number, verb.op, verb.type, verb.fetches, window, target, result, len(data), *run)
        assert Port(self._channel, 0).put("start_access", fields, bytes(data))
        self.turn()

    def unlock(self, window: int, target: int) -> None:
        assert Port(self._channel, 0).put("unlock", (window, target))
        self.turn()

    def ask(self, exclusive: bool) -> int:
        """Ask itself for the lock; the number of the request, which is kept."""
        call, body = BY_NAME["lock"], self._channel.bodies[1]
        call.packer.pack_into(body, 0, call.number, 0, _WINDOW, self.rank, int(exclusive))
        view = self._channel._view
        struct.pack_into("<I", view, 2 << 16, struct.unpack_from("<I", view, 2 << 16)[0] + 1)
        ring(self._channel)
        before = self.requests.next_number
        self.turn()
        return before

    def turn(self) -> None:
        while self.engine.step(False):
            pass

    def hear(self, frame: bytes) -> None:
        self._mpi.coming.append(frame)
        self.turn()


def _deliver(ranks: list[Any], chance: random.Random) -> None:
    """All messages, in order between two ranks and in any order else."""
    while ways := sorted({(source, dest) for source, one in enumerate(ranks) for dest, _ in one.sent}):
        source, dest = chance.choice(ways)
        index = next(i for i, (to, _) in enumerate(ranks[source].sent) if to == dest)
        _, frame = ranks[source].sent[index]
        del ranks[source].sent[index]
        ranks[dest].hear(frame)


_VERBS = st.builds(
    Verb,
    st.sampled_from([_SUM, _MAX, _FAILS, REPLACE, NO_OP, COMPARE_AND_SWAP]),
    st.sampled_from([_BYTE, _INT64]),
    st.booleans(),
)
_ACCESS = st.tuples(
    st.integers(0, _SIZE - 1),
    st.integers(0, _SIZE - 1),
    _VERBS,
    st.sampled_from([_WINDOW, _WINDOW, _WINDOW, _GONE]),
    st.integers(-8, _BYTES),
    st.integers(1, 40),
    st.sampled_from([0, 0, 0, -1]),
)


def _expected(one: Any, verb: Verb, window: int, run: tuple[int, int], data: bytes) -> tuple[int, bytes, bytes]:
    """Of an access by definition: error class, what it fetches, and the target's memory after it."""
    before, (offset, num_bytes) = bytes(one.memory), run
    if window != _WINDOW:
        return CLASSES["ERR_WIN"], b"", before
    if not 0 <= offset <= offset + num_bytes <= _BYTES:
        return CLASSES["ERR_RMA_RANGE"], b"", before
    old = before[offset : offset + num_bytes]
    try:
        new = old if verb.op == NO_OP else _Folder().fold(verb, bytearray(old), data)
    except (ValueError, _RealError) as error:
        return CLASSES["ERR_OP" if isinstance(error, _RealError) else "ERR_OTHER"], b"", before
    return 0, old if verb.fetches else b"", before[:offset] + new + before[offset + num_bytes :]


@given(st.lists(_ACCESS, min_size=1, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_accesses_do_what_they_are_by_definition(tmp_path_factory: pytest.TempPathFactory, accesses: list[Any]) -> None:
    """Also to this rank itself, of bytes that are no whole values, with too few data, and outside of windows."""
    folder, chance = tmp_path_factory.mktemp("accesses"), random.Random(4)
    ranks = [_Rank(rank, folder) for rank in range(_SIZE)]
    for index, (origin, target, verb, window, offset, num_bytes, more) in enumerate(accesses):
        number, run, there = FIRST_POSTED + index, (offset, num_bytes), ranks[target]
        data = b"" if verb.op == NO_OP else chance.randbytes(max(num_bytes + more, 0))
        if verb.op == COMPARE_AND_SWAP:
            data += bytes(there.memory[offset : offset + num_bytes]) if chance.random() < 0.5 else data
        error, fetched, after = _expected(there, verb, window, run, data)
        ranks[origin].start(number, verb, window, target, run, data)
        _deliver(ranks, chance)
        assert ranks[origin].fetched(number, len(fetched)) == (error, fetched)
        assert there.memory == after
    assert not any(one.windows.is_busy for one in ranks)
    assert all(one.num_in_python == 0 for one in ranks)


_PAIR_LETTERS = "hiqfdg"


def _pair(letter: str, value: int, index: int) -> bytes:
    if letter != "g":
        return struct.pack(f"={letter}i", value, index)
    # What lies behind its ten bytes is not defined.
    return np.longdouble(value).tobytes()[:10] + bytes(6) + struct.pack("=i", index)


@given(
    st.sampled_from([_MINLOC, _MAXLOC, _SUM]),
    st.sampled_from(_PAIR_LETTERS),
    st.integers(0, 1),
    st.lists(st.tuples(*[st.integers(-3, 3)] * 4), min_size=1, max_size=6),
)
@example(_MAXLOC, "g", 1, [(1, 1, 2, 2), (2, 2, 2, 1), (3, 0, -1, 0)])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_values_with_an_index_are_folded_without_the_real_mpi(
    tmp_path_factory: pytest.TempPathFactory,
    op: int,
    letter: str,
    target: int,
    values: list[tuple[int, int, int, int]],
) -> None:
    """Of equal values the smaller index stays."""
    folder = tmp_path_factory.mktemp("pairs")
    ranks = [_Rank(rank, folder, pair=letter) for rank in range(2)]
    old = b"".join(_pair(letter, a, b) for a, b, _, _ in values)
    data = b"".join(_pair(letter, c, d) for _, _, c, d in values)
    ranks[target].memory[: len(old)] = old
    ranks[0].start(FIRST_POSTED, Verb(op, _SHORT_INT, True), _WINDOW, target, (0, len(old)), data)
    _deliver(ranks, random.Random(1))
    if op == _SUM:
        assert ranks[0].fetched(FIRST_POSTED, 0) == (CLASSES["ERR_OTHER"], b"")
        return
    sign = 1 if op == _MINLOC else -1
    chosen = [min((a, b), (c, d), key=lambda one: (sign * one[0], one[1])) for a, b, c, d in values]
    assert ranks[0].fetched(FIRST_POSTED, len(old)) == (0, old)
    assert ranks[target].memory[: len(old)] == b"".join(_pair(letter, *one) for one in chosen)


@given(
    st.integers(0, (1 << 63) - 1),
    st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 60)), max_size=4),
    st.lists(st.tuples(st.integers(-80, 80), st.integers(0, 60)), min_size=1, max_size=3),
    st.sampled_from([0, 1 << 62, -(1 << 62), (1 << 63) - 100, 100 - (1 << 63)]),
)
@example(4096, [(0, 16), (16, 16), (33, 7)], [(8, 24)], 0)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_what_lies_within_a_window_is_the_same_in_c(
    tmp_path_factory: pytest.TempPathFactory,
    base: int,
    regions: list[tuple[int, int]],
    runs: list[tuple[int, int]],
    far: int,
) -> None:
    """Regions near its base and elsewhere, in an address space that numbers of 64 bits reach around.

    A run may lie in regions that meet, each of which the program has attached for itself.
    """
    rank = _Rank(0, tmp_path_factory.mktemp("regions"))
    places = {max(base + at + shift, 0): size for at, size in regions for shift in (0, far)}
    rank.windows.windows[_WINDOW] = Exposure(base, places)
    asked = [(offset + far, length) for offset, length in runs]

    def holds(address: int, length: int) -> bool:
        return any(start <= address and address + length <= start + size for start, size in places.items())

    is_inside = all(
        all(holds(base + offset + at, 1) for at in range(length)) if length else holds(base + offset, 0)
        for offset, length in asked
    )
    payload = b"".join(RUN.pack(*run) for run in asked)
    word = Verb(NO_OP, 0, fetches=False).pack()
    rank.hear(HEADER.pack(_WINDOW, word, What.ACCESS, 0, 1, len(runs), 5, len(payload), 0) + payload)
    _, answer = rank.sent.popleft()
    assert HEADER.unpack_from(answer)[1] == (0 if is_inside else CLASSES["ERR_RMA_RANGE"])
    assert rank.num_in_python == 0


@pytest.mark.parametrize(
    ("word", "num_runs", "payload"),
    [
        (255, 0, b""),
        (-1, 0, b""),
        (REPLACE | 255 << 8, 1, RUN.pack(0, 4) + b"data"),
        (REPLACE, 3, RUN.pack(0, 4) + b"data"),
        (REPLACE, -1, b"data"),
        (REPLACE, 1 << 30, b"data"),
        (REPLACE, 1, RUN.pack(0, -4)),
        (REPLACE, 1, RUN.pack(0, 8) + b"data"),
        (_SUM | _INT64 << 8, 1, RUN.pack(0, 4) + b"data"),
        (_SUM, 1, RUN.pack(0, 4)),
        (_SUM, 1, RUN.pack(0, 4) + b"datas"),
        (COMPARE_AND_SWAP, 1, RUN.pack(0, 4) + b"datadat"),
        (NO_OP | 1 << 16, 1, RUN.pack(0, EAGER_BYTES + 1)),
        (NO_OP | 1 << 16, 2, RUN.pack(0, EAGER_BYTES) * 2),
        (NO_OP | 1 << 16, 2, RUN.pack(0, (1 << 63) - 1) * 2),
    ],
)
def test_a_damaged_access_is_answered_with_an_error_and_touches_nothing(
    tmp_path: Path, word: int, num_runs: int, payload: bytes
) -> None:
    rank = _Rank(0, tmp_path)
    rank.windows.windows[_WINDOW].regions[rank.base] = 1 << 62
    before = bytes(rank.memory)
    rank.hear(HEADER.pack(_WINDOW, word, What.ACCESS, 0, 1, num_runs, 5, len(payload), 0) + payload)
    dest, answer = rank.sent.popleft()
    error = CLASSES["ERR_OTHER"]
    assert (dest, answer) == (1, HEADER.pack(_WINDOW, error, What.ACCESSED, 0, 0, 0, 5, 0, 0))
    assert bytes(rank.memory) == before


def test_memory_that_is_gone_is_an_error(tmp_path: Path) -> None:
    """A window that the program has let go of, without telling."""
    rank, payload = _Rank(0, tmp_path), RUN.pack(8, 4) + b"data"
    rank.windows.windows[_WINDOW] = Exposure(0, {0: 4096})
    for verb in (Verb(REPLACE, 0, fetches=False), Verb(NO_OP, 0, fetches=True)):
        rank.hear(HEADER.pack(_WINDOW, verb.pack(), What.ACCESS, 0, 1, 1, 5, len(payload), 0) + payload)
        assert HEADER.unpack_from(rank.sent.popleft()[1])[1] == CLASSES["ERR_OTHER"]


def test_memory_of_a_program_that_has_ended_is_for_its_rank_to_tell(tmp_path: Path) -> None:
    """The rank knows what the program ended with; who accesses the window would be blamed for it."""
    rank, payload = _Rank(0, tmp_path), RUN.pack(8, 4) + b"data"
    rank.windows.windows[_WINDOW] = Exposure(0, {0: 4096})
    rank.engine.attach(_NOBODY)
    for verb in (Verb(REPLACE, 0, fetches=False), Verb(NO_OP, 0, fetches=True)):
        with pytest.raises(ProcessLookupError):
            rank.hear(HEADER.pack(_WINDOW, verb.pack(), What.ACCESS, 0, 1, 1, 5, len(payload), 0) + payload)
    assert not rank.sent


@pytest.mark.parametrize(("source", "request_number"), [(2, FIRST_POSTED), (1, FIRST_POSTED + 1)])
def test_an_answer_that_nobody_waits_for_is_an_error(tmp_path: Path, source: int, request_number: int) -> None:
    rank = _Rank(0, tmp_path)
    rank.start(FIRST_POSTED, Verb(NO_OP, 0, fetches=True), _WINDOW, 1, (0, 4), b"")
    with pytest.raises(ValueError, match=f"rank {source} answers access {request_number}, which is not under way"):
        rank.hear(HEADER.pack(_WINDOW, 0, What.ACCESSED, 0, source, 0, request_number, 4, 0) + b"data")
    assert rank.windows.is_busy and not rank.requests.by_number[FIRST_POSTED].done


@pytest.mark.parametrize(("fetches", "payload"), [(True, b""), (True, b"12345"), (False, b"1234")])
def test_an_answer_of_another_length_than_was_asked_for_is_an_error(
    tmp_path: Path, fetches: bool, payload: bytes
) -> None:
    rank = _Rank(0, tmp_path)
    rank.start(FIRST_POSTED, Verb(REPLACE, 0, fetches), _WINDOW, 1, (0, 4), b"data")
    rank.hear(HEADER.pack(_WINDOW, 0, What.ACCESSED, 0, 1, 0, FIRST_POSTED, len(payload), 0) + payload)
    assert rank.fetched(FIRST_POSTED, 0) == (CLASSES["ERR_OTHER"], b"")


def test_a_short_access_does_not_overtake_a_long_one(tmp_path: Path) -> None:
    ranks = [_Rank(0, tmp_path), _Rank(1, tmp_path)]
    num_bytes = 12 * EAGER_BYTES
    long, given_bytes = bytearray(num_bytes), bytes([7]) * num_bytes
    start = NATIVE.address_of(long)
    ranks[1].windows.windows[_WINDOW] = Exposure(start, {start: num_bytes})
    place = Operands(_WINDOW, 1, given_bytes, num_bytes, 0)
    request = ranks[0].windows.access(place, Verb(REPLACE, 0, fetches=False), [(0, num_bytes)], 1)
    ranks[0].start(FIRST_POSTED, Verb(REPLACE, 0, True), _WINDOW, 1, (num_bytes - 4, 4), b"last")
    assert ranks[0].num_in_python == 1
    _deliver(ranks, random.Random(2))
    assert request.done and ranks[0].fetched(FIRST_POSTED, 4) == (0, bytes([7]) * 4)
    assert long == given_bytes[:-4] + b"last"
    # When nothing waits any more, they are the engine's again.
    in_python = ranks[0].num_in_python
    ranks[0].start(FIRST_POSTED + 1, Verb(NO_OP, 0, True), _WINDOW, 1, (num_bytes - 4, 4), b"")
    _deliver(ranks, random.Random(2))
    assert ranks[0].fetched(FIRST_POSTED + 1, 4) == (0, b"last") and ranks[0].num_in_python == in_python


def test_while_closed_accesses_of_others_are_served_and_own_ones_stay_in_their_ring(tmp_path: Path) -> None:
    ranks = [_Rank(0, tmp_path), _Rank(1, tmp_path)]
    ranks[0].start(FIRST_POSTED, Verb(REPLACE, 0, True), _WINDOW, 1, (0, 4), b"mine")
    for one in ranks:
        one.engine.set(True, 0)
    ranks[0].start(FIRST_POSTED + 1, Verb(REPLACE, 0, True), _WINDOW, 1, (0, 4), b"late")
    assert ranks[0].windows.is_busy
    _deliver(ranks, random.Random(1))
    assert not ranks[0].windows.is_busy and ranks[1].memory[:4] == b"mine"
    assert FIRST_POSTED + 1 not in ranks[0].requests.by_number
    ranks[0].engine.set(False, 0)
    ranks[0].turn()
    _deliver(ranks, random.Random(1))
    assert ranks[0].fetched(FIRST_POSTED + 1, 4) == (0, b"mine") and ranks[1].memory[:4] == b"late"


# Locks.


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_lock_is_shared_or_one_rank_s_and_goes_to_who_came_first(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, bool]]
) -> None:
    """Rank 0 asks itself."""
    rank, oracle = _Rank(0, tmp_path_factory.mktemp("locks")), DumbLock()
    numbers: dict[int, int] = {}
    for number, (source, exclusive) in enumerate(events, 100):
        is_known = source in {asker.rank for asker in oracle.holders + oracle.waiting}
        # Who waits for a lock does not give it back.
        if source in {asker.rank for asker in oracle.waiting}:
            continue
        if source == 0 and not is_known:
            number = rank.ask(exclusive)
        asker = Asker(source, exclusive, number)
        granted = oracle.release(source) if is_known else oracle.ask(asker)
        if source:
            what = What.UNLOCK if is_known else What.LOCK
            rank.hear(HEADER.pack(_WINDOW, int(exclusive), what, 0, source, 0, number, 0, 0))
        elif is_known:
            rank.unlock(_WINDOW, 0)
        numbers[source] = number
        locks = rank.windows.windows[_WINDOW].locks
        assert (locks.holders, locks.waiting) == (oracle.holders, oracle.waiting)
        assert len(locks.holders) <= 1 or not any(holder.exclusive for holder in locks.holders)
        told = [
            (one.rank, HEADER.pack(_WINDOW, 0, What.LOCKED, 0, 0, 0, one.request, 0, 0)) for one in granted if one.rank
        ]
        assert list(rank.sent) == told
        rank.sent.clear()
        if 0 in numbers and numbers[0] in rank.requests.by_number:
            holds = 0 in {holder.rank for holder in locks.holders}
            assert rank.requests.by_number[numbers[0]].done >= holds


def test_a_lock_of_a_window_that_is_gone_is_refused_and_giving_it_back_is_of_no_account(tmp_path: Path) -> None:
    rank = _Rank(0, tmp_path)
    rank.hear(HEADER.pack(_GONE, 0, What.UNLOCK, 0, 1, 0, 0, 0, 0))
    assert not rank.sent
    rank.hear(HEADER.pack(_GONE, 1, What.LOCK, 0, 1, 0, 9, 0, 0))
    assert rank.sent.popleft() == (1, HEADER.pack(_GONE, CLASSES["ERR_WIN"], What.LOCKED, 0, 0, 0, 9, 0, 0))


def test_what_a_program_posts_to_give_a_lock_back_reaches_its_target(tmp_path: Path) -> None:
    rank = _Rank(0, tmp_path)
    rank.unlock(_WINDOW, 2)
    assert rank.sent.popleft() == (2, HEADER.pack(_WINDOW, 0, What.UNLOCK, 0, 0, 0, 0, 0, 0))
