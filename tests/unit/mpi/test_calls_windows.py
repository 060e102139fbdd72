"""Windows without MPI: locks, chunks, folds, and two lower halves that access each other's make-believe programs."""

from __future__ import annotations

import random
import struct
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.errors import FormatError
from remesh.mpi.calls.error_classes import CLASSES
from remesh.mpi.calls.table import ACCESS_OPS, EAGER_BYTES, PAIR_FORMATS, REAL_TYPES, RUN
from remesh.mpi.lower import state
from remesh.mpi.lower.accesses import (
    COMPARE_AND_SWAP,
    NO_OP,
    REPLACE,
    Chunk,
    Verb,
    cut,
    pack_runs,
    unpack_runs,
)
from remesh.mpi.lower.exposure import Asker, Locks, Window
from remesh.mpi.lower.folding import Folder, fold_pairs
from remesh.mpi.lower.requests import SUCCESS, Request, Requests
from remesh.mpi.lower.windows import CHUNKS_UNDER_WAY, Place, Windows
from remesh.mpi.lower.wire import What
from remesh.mpi.upper import layouts
from remesh.mpi.upper.datatype import PREDEFINED
from remesh.mpi.upper.op import OPS

_BASE, _MEMORY_BYTES, _WINDOW = 1 << 40, 1 << 18, 77
_SUM = Verb(ACCESS_OPS.index("SUM"), REAL_TYPES.index("UINT8_T"), fetches=False)


# Locks.


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_a_lock_is_shared_or_one_rank_s_and_goes_to_who_came_first(events: list[tuple[int, bool]]) -> None:
    locks, asked, granted = Locks(), [], []
    for number, (rank, exclusive) in enumerate(events):
        if rank in {holder.rank for holder in locks.holders}:
            granted += locks.release(rank)
        elif rank not in {asker.rank for asker in locks.waiting}:
            asked.append(Asker(rank, exclusive, number))
            granted += locks.ask(asked[-1])
        assert len(locks.holders) <= 1 or not any(holder.exclusive for holder in locks.holders)
        # Whoever waits is kept by a holder, if only by one whom somebody before him may not join.
        assert not locks.waiting or locks.holders
        assert not locks.waiting or locks.waiting[0].exclusive or locks.holders[0].exclusive
        assert granted + locks.waiting == asked


# Runs, chunks, verbs.


@given(
    st.lists(st.tuples(st.integers(-(2**40), 2**40), st.integers(1, 3000)), max_size=20),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.integers(256, 1000),
)
def test_chunks_are_the_runs_in_order_in_whole_elements_that_fit(
    shape: list[tuple[int, int]], unit: int, room: int
) -> None:
    runs = [(offset, length * unit) for offset, length in shape]
    chunks = list(cut(runs, unit, room))
    positions = [offset + byte for offset, length in runs for byte in range(length)]
    covered = [offset + byte for chunk in chunks for offset, length in chunk.runs for byte in range(length)]
    assert covered == positions
    for before, chunk in zip([Chunk(0, ()), *chunks], chunks, strict=False):
        assert chunk.position == before.position + before.num_bytes
        assert chunk.num_bytes % unit == 0 and chunk.num_bytes + RUN.size * len(chunk.runs) <= room


@given(st.integers(1, 400), st.integers(256, 600))
def test_values_that_lie_in_two_runs_stay_in_one_chunk(count: int, room: int) -> None:
    runs = layouts.runs(PREDEFINED["SHORT_INT"]._layout, 0, count)
    assert all(chunk.num_bytes % 6 == 0 for chunk in cut(runs, 6, room))


@given(st.lists(st.tuples(st.integers(-(2**60), 2**60), st.integers(0, 2**40)), max_size=8))
def test_runs_come_back_from_their_bytes(runs: list[tuple[int, int]]) -> None:
    assert unpack_runs(pack_runs(runs) + b"data", len(runs)) == runs


@pytest.mark.parametrize(("data", "num_runs"), [(b"", 1), (bytes(31), 2), (b"", -1), (RUN.pack(0, -1), 1)])
def test_bytes_that_are_no_runs_are_refused(data: bytes, num_runs: int) -> None:
    with pytest.raises(ValueError, match="run"):
        unpack_runs(data, num_runs)


@given(st.integers(0, len(ACCESS_OPS) - 1), st.integers(0, len(REAL_TYPES) - 1), st.booleans())
def test_verbs_come_back_from_their_number(op: int, kind: int, fetches: bool) -> None:
    verb = Verb(op, kind, fetches)
    assert Verb.unpack(verb.pack()) == verb and verb.pack() < 1 << 31


@pytest.mark.parametrize("word", [len(ACCESS_OPS), 255 << 8, -1])
def test_numbers_that_are_no_verb_are_refused(word: int) -> None:
    with pytest.raises(ValueError, match="operation"):
        Verb.unpack(word)


# Folds.


@given(
    st.sampled_from(["MINLOC", "MAXLOC"]),
    st.sampled_from(sorted(PAIR_FORMATS)),
    st.lists(st.tuples(*[st.integers(-3, 3)] * 4), min_size=1, max_size=6),
)
def test_pairs_fold_as_the_collectives_fold_them(op: str, name: str, values: list[tuple[int, int, int, int]]) -> None:
    form = PAIR_FORMATS[name]
    old = b"".join(struct.pack(form, a, b) for a, b, _, _ in values)
    data = b"".join(struct.pack(form, c, d) for _, _, c, d in values)
    expected = OPS[op]._fold([memoryview(old), memoryview(data)], PREDEFINED[name], len(values))
    assert fold_pairs(op, form, bytearray(old), data) == expected


@pytest.mark.parametrize(("expected", "left"), [(b"abcd", b"WXYZ"), (b"abcx", b"abcd")])
def test_compare_and_swap_writes_only_over_what_it_expects(expected: bytes, left: bytes) -> None:
    verb = Verb(COMPARE_AND_SWAP, 0, fetches=True)
    assert Folder(None).fold(verb, bytearray(b"abcd"), b"WXYZ" + expected) == left


@pytest.mark.parametrize("op", [REPLACE, COMPARE_AND_SWAP, 0])
def test_data_of_another_length_than_the_target_s_are_refused(op: int) -> None:
    with pytest.raises(ValueError, match="bytes of data"):
        Folder(None).fold(Verb(op, 0, fetches=False), bytearray(4), b"abc")


# Two ranks.


class _Memory:
    """A program's memory: some bytes from an address on."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    def _at(self, address: int, num_bytes: int) -> slice:
        if not 0 <= address - _BASE <= address - _BASE + num_bytes <= len(self.data):
            raise OSError(f"nothing at {address:#x}")
        return slice(address - _BASE, address - _BASE + num_bytes)

    def read(self, address: int, num_bytes: int) -> bytearray:
        return self.data[self._at(address, num_bytes)]

    def write(self, address: int, data: bytes) -> None:
        self.data[self._at(address, len(data))] = data


class _Sum:
    """Adds bytes, as a real MPI would."""

    @staticmethod
    def Reduce_local(data: list[Any], result: list[Any]) -> None:
        result[0][:] = bytes((a + b) & 255 for a, b in zip(data[0], result[0], strict=True))


_MPI = SimpleNamespace(Exception=ArithmeticError, SUM=_Sum, UINT8_T=None)


class _Rank:
    """One lower half's windows; what it sends waits in ``sent``."""

    def __init__(self, rank: int, data: bytes) -> None:
        self.memory, self.requests = _Memory(data), Requests(Request)
        self.sent: deque[tuple[int, tuple[Any, ...], bytes]] = deque()
        wire = SimpleNamespace(rank=rank, send=lambda dest, fields, payload=b"": self._send(dest, fields, payload))
        self.windows = Windows(_MPI, wire, self.memory, self.requests)  # type: ignore[arg-type]  # make-believe parts
        self.windows.windows[_WINDOW] = Window(_BASE, {_BASE: _MEMORY_BYTES // 2})

    def _send(self, dest: int, fields: tuple[Any, ...], payload: bytes) -> None:
        assert len(payload) <= EAGER_BYTES and all(-(1 << 31) <= fields[index] < 1 << 31 for index in (1, 5))
        self.sent.append((dest, fields, bytes(payload)))


def _pair() -> list[_Rank]:
    chance = random.Random(3)
    return [_Rank(rank, chance.randbytes(_MEMORY_BYTES)) for rank in range(2)]


def _deliver(ranks: list[_Rank], chance: random.Random) -> None:
    """All messages, in order between two ranks and in any order else."""
    while senders := [rank for rank, one in enumerate(ranks) if one.sent]:
        source = chance.choice(senders)
        dest, fields, payload = ranks[source].sent.popleft()
        ranks[dest].windows.on_message(source, fields, memoryview(payload))


@given(
    st.integers(0, 1),
    st.sampled_from([REPLACE, NO_OP, _SUM.op]),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 9000)), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_an_access_does_to_the_target_what_its_verb_says(
    target: int, op: int, fetches: bool, shape: list[tuple[int, int]], chance: random.Random
) -> None:
    ranks = _pair()
    origin, there = ranks[0], ranks[target]
    # Runs one behind another, so that the order in which they are written is of no account.
    runs, end = [], 0
    for gap, length in shape:
        runs.append((end + gap, length))
        end += gap + length
    num_bytes = sum(length for _, length in runs)
    half, result = _MEMORY_BYTES // 2, _BASE + _MEMORY_BYTES - num_bytes
    data = bytes(origin.memory.data[half : half + num_bytes])
    expected, old, position = bytearray(there.memory.data), b"", 0
    for offset, length in runs:
        was, given = expected[offset : offset + length], data[position : position + length]
        old, position = old + was, position + length
        if op == REPLACE:
            expected[offset : offset + length] = given
        elif op != NO_OP:
            expected[offset : offset + length] = bytes((a + b) & 255 for a, b in zip(was, given, strict=True))
    place = Place(_WINDOW, target, _BASE + half, 0 if op == NO_OP else num_bytes, result)
    request = origin.windows.access(place, Verb(op, _SUM.type, fetches), runs, 1)
    assert len(origin.sent) <= CHUNKS_UNDER_WAY
    _deliver(ranks, chance)
    assert request.done and request.error == SUCCESS and not origin.windows.is_busy
    if fetches:
        assert origin.memory.read(result, num_bytes) == old
    assert there.memory.data[:half] == expected[:half]


def test_accesses_of_one_origin_are_carried_out_in_order() -> None:
    ranks = _pair()
    half, num_bytes = _MEMORY_BYTES // 2, 60_000
    for number in range(30):
        ranks[0].memory.data[half : half + num_bytes] = bytes([number]) * num_bytes
        place = Place(_WINDOW, 1, _BASE + half, num_bytes, 0)
        request = ranks[0].windows.access(place, Verb(REPLACE, 0, fetches=False), [(0, num_bytes)], 1)
        # A later one, which is short, does not overtake it.
        after = Place(_WINDOW, 1, _BASE + half, 0, _BASE + _MEMORY_BYTES - 1)
        last = ranks[0].windows.access(after, Verb(NO_OP, 0, fetches=True), [(num_bytes - 1, 1)], 1)
        _deliver(ranks, random.Random(number))
        assert request.done and last.done and ranks[0].memory.data[-1] == number


@pytest.mark.parametrize(
    ("window", "runs", "error"),
    [
        (_WINDOW, [(_MEMORY_BYTES // 2 - 3, 4)], "ERR_RMA_RANGE"),
        (_WINDOW, [(0, 8), (-1, 2)], "ERR_RMA_RANGE"),
        (_WINDOW, [(1 << 62, 8)], "ERR_RMA_RANGE"),
        (_WINDOW + 1, [(0, 8)], "ERR_WIN"),
    ],
)
@pytest.mark.parametrize("target", [0, 1])
def test_what_is_outside_the_window_is_not_touched(
    target: int, window: int, runs: list[tuple[int, int]], error: str
) -> None:
    ranks = _pair()
    before = [bytes(one.memory.data) for one in ranks]
    num_bytes = sum(length for _, length in runs)
    request = ranks[0].windows.access(Place(window, target, _BASE, num_bytes, _BASE), _SUM, runs, 1)
    _deliver(ranks, random.Random(1))
    assert request.done and request.error == CLASSES[error] and not ranks[0].windows.is_busy
    assert [bytes(one.memory.data) for one in ranks] == before


def test_an_operation_that_the_real_mpi_refuses_is_an_error_of_the_operation() -> None:
    ranks = _pair()

    class _Refuses:
        @staticmethod
        def Reduce_local(data: list[Any], result: list[Any]) -> None:
            raise ArithmeticError

    ranks[1].windows._folder = Folder(SimpleNamespace(SUM=_Refuses, UINT8_T=None))
    request = ranks[0].windows.access(Place(_WINDOW, 1, _BASE, 4, 0), _SUM, [(0, 4)], 1)
    _deliver(ranks, random.Random(1))
    assert request.error == CLASSES["ERR_OP"]


@pytest.mark.parametrize(
    ("word", "num_runs", "payload"),
    [
        (255, 0, b""),
        (REPLACE, 3, RUN.pack(0, 4) + b"data"),
        (REPLACE, -1, b"data"),
        (REPLACE, 1, RUN.pack(0, -4)),
        (REPLACE, 1, RUN.pack(0, 8) + b"data"),
        (_SUM.pack(), 1, RUN.pack(0, 4)),
    ],
)
def test_a_damaged_request_is_answered_with_an_error(word: int, num_runs: int, payload: bytes) -> None:
    rank = _pair()[0]
    before = bytes(rank.memory.data)
    rank.windows.on_message(1, (_WINDOW, word, What.ACCESS, 5, len(payload), num_runs, 0), payload)
    dest, fields, answer = rank.sent.popleft()
    assert (dest, fields[1], fields[2], fields[3], answer) == (1, CLASSES["ERR_OTHER"], What.ACCESSED, 5, b"")
    assert bytes(rank.memory.data) == before


def test_a_lock_that_waits_is_granted_by_the_next_lower_halves() -> None:
    ranks, chance = _pair(), random.Random(5)
    mine = ranks[1].windows.lock(_WINDOW, 1, exclusive=True)
    theirs = ranks[0].windows.lock(_WINDOW, 1, exclusive=False)
    _deliver(ranks, chance)
    assert mine.done and not theirs.done and not ranks[0].windows.is_busy
    # What state.py keeps of both.
    after = _pair()
    for old, new in zip(ranks, after, strict=True):
        new.windows.windows.update(old.windows.windows)
        new.requests.by_number.update(old.requests.by_number)
    after[1].windows.unlock(_WINDOW, 1)
    _deliver(after, chance)
    assert theirs.done and theirs.error == SUCCESS
    after[0].windows.unlock(_WINDOW, 1)
    _deliver(after, chance)
    assert after[1].windows.windows[_WINDOW].locks == Locks()


def test_what_comes_for_a_window_that_is_gone_is_refused_or_of_no_account() -> None:
    rank = _pair()[0]
    rank.windows.on_message(1, (5, 0, What.UNLOCK, 0, 0, 0, 0), b"")
    assert not rank.sent
    rank.windows.on_message(1, (5, 1, What.LOCK, 9, 0, 0, 0), b"")
    assert rank.sent.popleft()[1][:4] == (5, CLASSES["ERR_WIN"], What.LOCKED, 9)


# Their state.


@pytest.mark.parametrize(
    "window",
    [
        [9, -1, [], [], []],
        [9, 0, [[-8, 8]], [], []],
        [9, 0, [[8, -8]], [], []],
        [9, 0, [[8]], [], []],
        [9, 0, [], [[3, True, 1]], []],
        [9, 0, [], [], [[-1, True, 1]]],
        [9, 0, [], [[0, True, 1], [1, False, 2]], []],
        [9, 0, [], [[0, True]], []],
        [9],
        ["nine", 0, [], [], []],
    ],
)
def test_a_window_that_no_lower_half_would_have_written_is_noticed(window: list[Any]) -> None:
    records = {
        "rank": 0,
        "size": 3,
        "next": {},
        "finished": False,
        "windows": [window],
        **{name: [] for name in ("requests", "posted", "arrived", "messages", "owed", "parcels", "members")},
        "entered": [],
        "attached": [],
    }
    sound = state.pack(records | {"windows": [[9, 8, [[8, 80]], [[0, True, 1]], [[2, False, 2]]]]}, [])
    assert state.load(sound, rank=0, size=3).windows == {
        9: Window(8, {8: 80}, Locks([Asker(0, True, 1)], [Asker(2, False, 2)]))
    }
    with pytest.raises(FormatError) as caught:
        state.load(state.pack(records, []), rank=0, size=3)
    assert caught.value.reason == "damaged"
