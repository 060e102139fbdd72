"""Short accesses to windows and their locks: the engine in C does what the Python parts do, and with them."""

from __future__ import annotations

import array
import ctypes
import os
import random
import struct
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remesh.mpi.calls.error_classes import CLASSES
from remesh.mpi.calls.table import ACCESS_OPS, EAGER_BYTES, FIRST_POSTED, REAL_OPS, RUN
from remesh.mpi.channel import Channel
from remesh.mpi.lower.accesses import COMPARE_AND_SWAP, NO_OP, REPLACE, Verb
from remesh.mpi.lower.exposure import Asker, Locks, Window
from remesh.mpi.lower.matching import Matching
from remesh.mpi.lower.records import Request
from remesh.mpi.lower.requests import Requests
from remesh.mpi.lower.upper_memory import UpperMemory
from remesh.mpi.lower.windows import Place, Windows
from remesh.mpi.lower.wire import HEADER, What
from remesh.mpi.native import NATIVE
from tests.unit.mpi.make_believe_mpi import PromptMpi, make_setup, pack_frame, unpack_frame

_WINDOW, _GONE, _BYTES, _SIZE = 77, 78, 256, 3
_SUM, _MAX, _MAXLOC = (REAL_OPS.index(name) for name in ("SUM", "MAX", "MAXLOC"))
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
    """As `lower.folding.Folder`, whose checks of lengths the tests of windows have."""

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


class _InPython:
    """A rank whose lower half has no engine, and the memory that it gives."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.sent = rank, deque[tuple[int, bytes]]()
        self.memory = bytearray(random.Random(rank).randbytes(2 * _BYTES))
        self.result = bytearray(_BYTES)
        self.requests = Requests(Request)
        memory = UpperMemory()
        memory.attach(os.getpid())
        self.windows = Windows(SimpleNamespace(Exception=_RealError), self, memory, self.requests)  # type: ignore[arg-type]
        self.windows._folder = _Folder()  # type: ignore[assignment]
        self.base = NATIVE.address_of(self.memory)
        self.windows.windows[_WINDOW] = Window(self.base, {self.base: _BYTES})

    def send(self, dest: int, fields: tuple[int, ...], payload: bytes = b"") -> None:
        self.sent.append((dest, pack_frame(self.rank, fields, payload)))

    def start(self, number: int, verb: Verb, window: int, target: int, run: tuple[int, int], data: bytes) -> None:
        """An access as the program posts it."""
        place = Place(window, target, data, len(data), NATIVE.address_of(self.result))
        self.windows.access(place, verb, [run], 1, number=number)

    def hear(self, frame: bytes) -> None:
        self.windows.on_message(*unpack_frame(frame))

    def fetched(self, number: int, num_bytes: int) -> tuple[int, bytes]:
        """Error class of an access that is over, and what it has fetched."""
        request = self.requests.by_number[number]
        assert request.done
        data = bytes(self.result[:num_bytes]) if request.payload is None else bytes(request.payload)
        return request.error, data


class _InC(_InPython):
    """A rank with an engine on a make-believe MPI; what that leaves to Python is done as above."""

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__(rank, folder)
        self.num_in_python = 0
        self._mpi = PromptMpi(self._reduce)
        self.sent = self._mpi.sent
        self._channel = Channel.create(str(folder / f"channel-{rank}"))
        self.port = Channel.map(str(folder / f"channel-{rank}")).port(0)
        self.engine = NATIVE.Engine(
            make_setup(
                self._channel,
                self.requests,
                Matching(),
                self._mpi.frame,
                self._mpi.functions,
                ops=tuple(range(100, 100 + len(REAL_OPS))),
                types=(200, 201, 202),
                extents=_EXTENTS,
                rank=rank,
                size=_SIZE,
                windows=self.windows.windows,
                accesses=self.windows.accesses,
                access_queues=self.windows.queues,
                neighbours=bytes(_SIZE),
                on_message=self._on_message,
                serve_posted=self._serve_posted,
                on_match=None,
                on_refused=None,
            )
        )
        self.engine.attach(os.getpid())

    def send(self, dest: int, fields: tuple[int, ...], payload: bytes = b"") -> None:
        self.engine.send(dest, fields, payload)

    def _reduce(self, before: int, after: int, count: int, datatype: int, op: int) -> int:
        if op - 100 == _FAILS:
            return 1
        unit = _EXTENTS[datatype - 200]
        operands = (ctypes.string_at(place, count * unit) for place in (before, after))
        ctypes.memmove(after, _fold(op - 100, unit, *operands), count * unit)
        return 0

    def _on_message(self, source: int, fields: tuple[Any, ...], payload: bytes) -> None:
        self.num_in_python += 1
        self.windows.on_message(source, fields, payload)

    def _serve_posted(self, slot: int, call: bytes) -> None:
        self.num_in_python += 1
        _, number, op, kind, fetches, window, target, _, num_data, *run = struct.unpack_from("<BQBBBQiQIqq", call)
        data = call[52 : 52 + num_data]
        super().start(number, Verb(op, kind, bool(fetches)), window, target, (run[0], run[1]), data)

    def start(self, number: int, verb: Verb, window: int, target: int, run: tuple[int, int], data: bytes) -> None:
        result = NATIVE.address_of(self.result)
        numbers = (verb.op, verb.type, verb.fetches)
        assert self.port.post_access(number, numbers, (window, target), run, data, result)
        self.turn()

    def turn(self) -> None:
        while self.engine.step(False):
            pass

    def hear(self, frame: bytes) -> None:
        self._mpi.coming.append(frame)
        self.turn()


_WAYS: list[Any] = [_InPython] if NATIVE.Engine is None else [_InPython, _InC]
_needs_engine = pytest.mark.skipif(NATIVE.Engine is None, reason="the C extension is not built")


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


@given(st.lists(st.sampled_from(_WAYS), min_size=_SIZE, max_size=_SIZE), st.lists(_ACCESS, min_size=1, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=80)
def test_accesses_do_the_same_in_c_as_in_python(
    tmp_path_factory: pytest.TempPathFactory, ways: list[Any], accesses: list[Any]
) -> None:
    """Also to this rank itself, of bytes that are no whole values, with too few data, and outside of windows."""
    folder, chance = tmp_path_factory.mktemp("accesses"), random.Random(4)
    ranks = [way(rank, folder) for rank, way in enumerate(ways)]
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
    # Everything here is for the engine, but what comes from a rank without.
    assert all(one.num_in_python == 0 for one in ranks if isinstance(one, _InC))


@pytest.mark.parametrize("ways", [[one, other] for one in _WAYS for other in _WAYS])
def test_values_with_an_index_are_folded_by_python(tmp_path: Path, ways: list[Any]) -> None:
    ranks = [way(rank, tmp_path) for rank, way in enumerate(ways)]
    for target in (0, 1):
        before, data = bytes(ranks[target].memory), bytes(range(6))
        ranks[0].start(FIRST_POSTED + target, Verb(_MAXLOC, _SHORT_INT, True), _WINDOW, target, (0, 6), data)
        _deliver(ranks, random.Random(1))
        assert ranks[0].fetched(FIRST_POSTED + target, 6) == (0, before[:6])
        assert bytes(ranks[target].memory) == _fold(_MAXLOC, 1, data, before[:6]) + before[6:]
        assert not hasattr(ranks[target], "num_in_python") or ranks[target].num_in_python


@_needs_engine
@given(
    st.integers(0, (1 << 63) - 1),
    st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 60)), max_size=4),
    st.lists(st.tuples(st.integers(-80, 80), st.integers(0, 60)), min_size=1, max_size=3),
    st.sampled_from([0, 1 << 62, -(1 << 62), (1 << 63) - 100, 100 - (1 << 63)]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_lies_within_a_window_is_the_same_in_c(
    tmp_path_factory: pytest.TempPathFactory,
    base: int,
    regions: list[tuple[int, int]],
    runs: list[tuple[int, int]],
    far: int,
) -> None:
    """Regions near its base and elsewhere, in an address space that numbers of 64 bits reach around."""
    rank = _InC(0, tmp_path_factory.mktemp("regions"))
    places = {max(base + at + shift, 0): size for at, size in regions for shift in (0, far)}
    window = rank.windows.windows[_WINDOW] = Window(base, places)
    asked = [(offset + far, length) for offset, length in runs]
    payload = b"".join(RUN.pack(*run) for run in asked)
    word = Verb(NO_OP, 0, fetches=False).pack()
    rank.hear(HEADER.pack(_WINDOW, word, What.ACCESS, 1, len(runs), 5, len(payload), 0) + payload)
    _, answer = rank.sent.popleft()
    assert HEADER.unpack_from(answer)[1] == (0 if window.holds(asked) else CLASSES["ERR_RMA_RANGE"])
    assert rank.num_in_python == 0


@pytest.mark.parametrize("way", _WAYS)
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
    tmp_path: Path, way: Any, word: int, num_runs: int, payload: bytes
) -> None:
    rank = way(0, tmp_path)
    rank.windows.windows[_WINDOW].regions[rank.base] = 1 << 62
    before = bytes(rank.memory)
    rank.hear(HEADER.pack(_WINDOW, word, What.ACCESS, 1, num_runs, 5, len(payload), 0) + payload)
    dest, answer = rank.sent.popleft()
    error = CLASSES["ERR_OTHER"]
    assert (dest, answer) == (1, HEADER.pack(_WINDOW, error, What.ACCESSED, 0, 0, 5, 0, 0))
    assert bytes(rank.memory) == before


@pytest.mark.parametrize("way", _WAYS)
def test_memory_that_is_gone_is_an_error(tmp_path: Path, way: Any) -> None:
    """A window that the program has let go of, without telling."""
    rank, payload = way(0, tmp_path), RUN.pack(8, 4) + b"data"
    rank.windows.windows[_WINDOW] = Window(0, {0: 4096})
    for verb in (Verb(REPLACE, 0, fetches=False), Verb(NO_OP, 0, fetches=True)):
        rank.hear(HEADER.pack(_WINDOW, verb.pack(), What.ACCESS, 1, 1, 5, len(payload), 0) + payload)
        assert HEADER.unpack_from(rank.sent.popleft()[1])[1] == CLASSES["ERR_OTHER"]


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize(("source", "request_number"), [(2, FIRST_POSTED), (1, FIRST_POSTED + 1)])
def test_an_answer_that_nobody_waits_for_is_an_error(
    tmp_path: Path, way: Any, source: int, request_number: int
) -> None:
    rank = way(0, tmp_path)
    rank.start(FIRST_POSTED, Verb(NO_OP, 0, fetches=True), _WINDOW, 1, (0, 4), b"")
    with pytest.raises(ValueError, match=f"rank {source} answers access {request_number}, which is not under way"):
        rank.hear(HEADER.pack(_WINDOW, 0, What.ACCESSED, source, 0, request_number, 4, 0) + b"data")
    assert rank.windows.is_busy and not rank.requests.by_number[FIRST_POSTED].done


@_needs_engine
@pytest.mark.parametrize(("fetches", "payload"), [(True, b""), (True, b"12345"), (False, b"1234")])
def test_an_answer_of_another_length_than_was_asked_for_is_an_error(
    tmp_path: Path, fetches: bool, payload: bytes
) -> None:
    rank = _InC(0, tmp_path)
    rank.start(FIRST_POSTED, Verb(REPLACE, 0, fetches), _WINDOW, 1, (0, 4), b"data")
    rank.hear(HEADER.pack(_WINDOW, 0, What.ACCESSED, 1, 0, FIRST_POSTED, len(payload), 0) + payload)
    assert rank.fetched(FIRST_POSTED, 0) == (CLASSES["ERR_OTHER"], b"")


@_needs_engine
def test_a_short_access_does_not_overtake_a_long_one(tmp_path: Path) -> None:
    ranks = [_InC(0, tmp_path), _InC(1, tmp_path)]
    num_bytes = 12 * EAGER_BYTES
    long, given_bytes = bytearray(num_bytes), bytes([7]) * num_bytes
    start = NATIVE.address_of(long)
    ranks[1].windows.windows[_WINDOW] = Window(start, {start: num_bytes})
    place = Place(_WINDOW, 1, given_bytes, num_bytes, 0)
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


@_needs_engine
def test_while_closed_accesses_of_others_are_served_and_own_ones_stay_in_their_ring(tmp_path: Path) -> None:
    ranks = [_InC(0, tmp_path), _InC(1, tmp_path)]
    ranks[0].start(FIRST_POSTED, Verb(REPLACE, 0, True), _WINDOW, 1, (0, 4), b"mine")
    for one in ranks:
        one.engine.set(True, False, 0)
    ranks[0].start(FIRST_POSTED + 1, Verb(REPLACE, 0, True), _WINDOW, 1, (0, 4), b"late")
    assert ranks[0].windows.is_busy
    _deliver(ranks, random.Random(1))
    assert not ranks[0].windows.is_busy and ranks[1].memory[:4] == b"mine"
    assert FIRST_POSTED + 1 not in ranks[0].requests.by_number
    ranks[0].engine.set(False, False, 0)
    ranks[0].turn()
    _deliver(ranks, random.Random(1))
    assert ranks[0].fetched(FIRST_POSTED + 1, 4) == (0, b"mine") and ranks[1].memory[:4] == b"late"


# Locks.


@given(
    st.lists(st.tuples(st.integers(1, 2), st.booleans()), max_size=20),
    st.lists(st.sampled_from(_WAYS), min_size=1, max_size=1),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_locks_go_to_the_same_ranks_in_c_as_by_their_rule(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, bool]], ways: list[Any]
) -> None:
    rank, oracle = ways[0](0, tmp_path_factory.mktemp("locks")), Locks()
    for number, (source, exclusive) in enumerate(events):
        known = {asker.rank for asker in oracle.holders + oracle.waiting}
        what = What.UNLOCK if source in known else What.LOCK
        # Who waits for a lock does not give it back.
        if source in {asker.rank for asker in oracle.waiting}:
            continue
        asker = Asker(source, exclusive, number)
        granted = oracle.ask(asker) if what == What.LOCK else oracle.release(source)
        rank.hear(HEADER.pack(_WINDOW, int(exclusive), what, source, 0, number, 0, 0))
        assert rank.windows.windows[_WINDOW].locks == oracle
        told = [(one.rank, HEADER.pack(_WINDOW, 0, What.LOCKED, 0, 0, one.request, 0, 0)) for one in granted]
        assert list(rank.sent) == told
        rank.sent.clear()


@pytest.mark.parametrize("way", _WAYS)
def test_a_lock_of_a_window_that_is_gone_is_refused_and_giving_it_back_is_of_no_account(
    tmp_path: Path, way: Any
) -> None:
    rank = way(0, tmp_path)
    rank.hear(HEADER.pack(_GONE, 0, What.UNLOCK, 1, 0, 0, 0, 0))
    assert not rank.sent
    rank.hear(HEADER.pack(_GONE, 1, What.LOCK, 1, 0, 9, 0, 0))
    assert rank.sent.popleft() == (1, HEADER.pack(_GONE, CLASSES["ERR_WIN"], What.LOCKED, 0, 0, 9, 0, 0))


@_needs_engine
def test_what_a_program_posts_to_give_a_lock_back_reaches_its_target(tmp_path: Path) -> None:
    rank = _InC(0, tmp_path)
    assert rank.port.post_unlock(_WINDOW, 2)
    rank.turn()
    assert rank.sent.popleft() == (2, HEADER.pack(_WINDOW, 0, What.UNLOCK, 0, 0, 0, 0, 0))


# The program's side.

_LETTERS = bytes(_INT64 if chr(code) in "lq" else 255 for code in range(128))
_ADD, _PUT, _GET, _SWAP = (_SUM, _LETTERS), (REPLACE, b""), (NO_OP, b""), (COMPARE_AND_SWAP, b"")


def _numbers(*values: int) -> array.array[int]:
    return array.array("q", values)


@_needs_engine
def test_accesses_of_plain_buffers_go_the_short_way(tmp_path: Path) -> None:
    rank = _InC(0, tmp_path)
    rank.memory[:16] = struct.pack("<qq", 5, 6)
    place, was = (_WINDOW, 0, 8), _numbers(0)
    accesses: list[tuple[Any, tuple[Any, ...], Any]] = [
        (_ADD, (1, True, _numbers(10), None, was), 6),
        (_SWAP, (1, True, _numbers(40), _numbers(16), was), 16),
        (_PUT, (0, False, _numbers(1, 2), None, None), None),
        (_GET, (1, False, None, None, was), 2),
        (_GET, (0, True, _numbers(9), None, was), 1),
    ]
    for number, (op, (displacement, is_one, *buffers), expected) in enumerate(accesses, FIRST_POSTED):
        kept = rank.port.access(number, op, place, displacement, is_one, *buffers)
        assert kept == 16 if buffers[2] is None else kept.obj is was
        rank.turn()
        view = None if buffers[2] is None else kept
        ended = _blocking(rank, lambda number=number, view=view: rank.port.wait([number], [view]))
        assert ended[0][3] == 0 and (expected is None or was[0] == expected)
    assert rank.memory[:16] == struct.pack("<qq", 1, 2)


def _blocking(rank: _InC, call: Callable[[], Any]) -> Any:
    """What a call of the upper half gives, while the lower half turns."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    while thread.is_alive():
        rank.turn()
        thread.join(0.001)
    return results[0]


@_needs_engine
def test_a_run_that_no_number_of_the_channel_names_is_not_posted(tmp_path: Path) -> None:
    rank = _InC(0, tmp_path)
    assert not rank.port.post_access(FIRST_POSTED, (NO_OP, 0, False), (_WINDOW, 1), (1 << 63, 8), b"", 0)
    rank.turn()
    assert not rank.sent


@_needs_engine
def test_a_full_ring_is_emptied_and_nothing_takes_the_long_way(tmp_path: Path) -> None:
    rank, count = _InC(0, tmp_path), 700
    place, one = (_WINDOW, 0, 8), _numbers(1)
    rank.memory[:8] = bytes(8)

    def post_all() -> list[Any]:
        numbers = range(FIRST_POSTED, FIRST_POSTED + count)
        return [rank.port.access(number, _ADD, place, 0, False, one, None, None) for number in numbers]

    assert _blocking(rank, post_all) == [8] * count
    rank.turn()
    assert rank.memory[:8] == struct.pack("<q", count) and rank.num_in_python == 0


@_needs_engine
@pytest.mark.parametrize(
    ("op", "displacement", "is_one", "buffers"),
    [
        (_ADD, 0, True, (_numbers(1, 2), None, _numbers(0, 0))),
        (_ADD, 0, True, (_numbers(1), None, array.array("i", [0, 0]))),
        (_ADD, 0, False, (array.array("f", [1.0]), None, None)),
        (_ADD, 0, True, (_numbers(1), None, b"readonly")),
        (_ADD, 1.5, True, (_numbers(1), None, _numbers(0))),
        (_ADD, [0, 1], True, (_numbers(1), None, _numbers(0))),
        (_ADD, 1 << 62, True, (_numbers(1), None, _numbers(0))),
        (_ADD, 1 << 80, True, (_numbers(1), None, _numbers(0))),
        (_PUT, 0, False, ([_numbers(1), "q"], None, None)),
        (_PUT, 0, False, (_numbers(), None, None)),
        (_PUT, 0, False, (bytes(4097), None, None)),
        (_SWAP, 0, True, (_numbers(1), array.array("d", [1.0]), _numbers(0))),
    ],
)
def test_what_is_not_for_the_short_way_changes_nothing(
    tmp_path: Path, op: Any, displacement: Any, is_one: bool, buffers: tuple[Any, ...]
) -> None:
    rank = _InC(0, tmp_path)
    before = bytes(rank.memory)
    assert rank.port.access(FIRST_POSTED, op, (_WINDOW, 0, 8), displacement, is_one, *buffers) is None
    rank.turn()
    assert not rank.requests.by_number and bytes(rank.memory) == before


def test_the_operations_of_the_c_files_are_those_of_the_table() -> None:
    assert [ACCESS_OPS[index] for index in (12, 13, 14)] == ["REPLACE", "NO_OP", "COMPARE_AND_SWAP"]
    assert len(REAL_OPS) == 12
