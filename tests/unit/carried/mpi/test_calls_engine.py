"""The engine in C on a real channel and a make-believe MPI."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import struct
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from remesh.carried.mpi.calls.table import ANY, BY_NAME, EAGER_BYTES, FIRST_POSTED, HELLO_REPLY, CallFlag, Kind
from remesh.carried.mpi.calls.wire_messages import HEADER, What
from remesh.carried.mpi.calls.words import NUM_SLOTS, POSTED, TAKEN
from remesh.carried.mpi.channel import SharedChannel
from remesh.carried.mpi.lower.collectives import Collectives
from remesh.carried.mpi.lower.half import MpiLowerHalf
from remesh.carried.mpi.lower.matching import Matching
from remesh.carried.mpi.lower.numbered import Numbered
from remesh.carried.mpi.lower.records import Arrived, Posted
from remesh.carried.mpi.lower.requests import SEND, Requests
from remesh.carried.mpi.native import NATIVE
from tests.profiles import NUM_COSTLY_EXAMPLES
from tests.unit.carried.mpi.fake_mpi import (
    FRAME_REQUEST,
    AskType,
    IsendType,
    PostedFrame,
    StartType,
    address_of,
    call_lower,
    make_setup,
    ring,
    sent_frame,
)
from tests.unit.carried.mpi.oracles import DumbMatching
from tests.unit.carried.mpi.program_side import Port

_PIECE_BYTES = 1 << 17
_GIVES_WAY = 2
"""At 128 in the channel: the lower half lets the upper one have the core."""
_NOBODY = 1 << 22
"""No process has this id."""
_Allgather = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t,
    ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64),
)  # fmt: skip


class _Half:
    """One engine of rank 0 of 2, its channel, and an MPI that holds what is sent and gives what it is told to."""

    def __init__(
        self,
        path: str,
        *,
        always_spins: bool = False,
        rank: int = 0,
        arena: tuple[int, int] = (0, 0),
        near: bool = True,
        give_way_us: int = 0,
        seat: tuple[int, ...] = (),
        serve: Callable[[int], int] = lambda slot: -1,
    ) -> None:
        self.rank = rank
        self.lower = SharedChannel.create(path)
        self.upper = SharedChannel.map(path)
        self.sent: deque[bytes] = deque()
        self.said: list[bytes] = []
        self.coming: deque[bytes] = deque()
        self.other = self
        self.pieces: deque[tuple[int, bytes, int]] = deque()
        self.untaken: set[int] = set()
        self.num_synchronous = 0
        self.num_asked = 0
        self.awaited: dict[int, tuple[int, int, int]] = {}
        self.seen: list[tuple[Any, ...]] = []
        self.owed: list[tuple[Any, Any]] = []
        self.requests, self.matching = Requests(), Matching(Numbered)
        self.entered = Numbered[int]()
        self.windows = Numbered[Any]()
        self._frame = PostedFrame()
        self._may_end = False
        self._keep = (
            IsendType(self._isend),
            AskType(self._test),
            StartType(lambda handle: 0),
            _Allgather(self._allgather),
            IsendType(self._irecv),
            IsendType(self._issend),
        )
        isend, test, start, allgather, irecv, issend = map(address_of, self._keep)
        self.engine = NATIVE.Engine(
            make_setup(
                self.lower,
                self.requests,
                self.matching,
                self._frame,
                (isend, test, start, allgather, 0, 0, irecv, 0, issend, 0, 0),
                rank=rank,
                size=2,
                entered=self.entered,
                reals=Numbered({0: (1, 2)}),
                windows=self.windows,
                on_message=lambda *message: self.seen.append(message),
                owed=self.owed,
                neighbours=bytes([near] * 2),
                piece_bytes=_PIECE_BYTES,
                arena_start=arena[0],
                arena_bytes=arena[1],
                always_spins=always_spins,
                give_way_us=give_way_us,
                seat=seat,
                serve=serve,
            )
        )

    def _isend(self, start: int, num_bytes: int, byte: int, dest: int, tag: int, comm: int, handle: Any) -> int:
        if tag:
            self.other.pieces.append((tag, ctypes.string_at(start, num_bytes), 0))
        else:
            self.sent.append(sent_frame(start, num_bytes))
            self.said.append(self.sent[-1])
        handle[0] = 0
        return 0

    def _issend(self, start: int, num_bytes: int, byte: int, dest: int, tag: int, comm: int, handle: Any) -> int:
        self.num_synchronous += 1
        handle[0] = 1_000_000 + self.num_synchronous
        self.untaken.add(handle[0])
        self.other.pieces.append((tag, ctypes.string_at(start, num_bytes), handle[0]))
        return 0

    def _irecv(self, start: int, num_bytes: int, byte: int, source: int, tag: int, comm: int, handle: Any) -> int:
        handle[0] = 1000 + len(self.awaited)
        self.awaited[handle[0]] = (tag, start, num_bytes)
        return 0

    def _take_piece(self, handle: int) -> bool:
        """The oldest one of a tag is for the receive that was started first, and all are asked about in that order."""
        tag, start, num_bytes = self.awaited[handle]
        for index, (one, piece, synchronous) in enumerate(self.pieces):
            if one == tag:
                assert len(piece) == num_bytes
                ctypes.memmove(start, piece, num_bytes)
                del self.pieces[index]
                self.other.untaken.discard(synchronous)
                return True
        return False

    def _test(self, handle: Any, flag: Any, status: int) -> int:
        self.num_asked += 1
        flag[0] = 1
        if handle[0] == FRAME_REQUEST:
            flag[0] = bool(self.coming)
            if self.coming:
                self._frame.put(self.coming.popleft())
        elif handle[0] == 50:
            flag[0] = self._may_end
        elif handle[0] >= 1_000_000:
            flag[0] = handle[0] not in self.untaken
        elif handle[0] >= 1000:
            flag[0] = self._take_piece(handle[0])
        return 0

    def _allgather(self, *arguments: Any) -> int:
        handle = arguments[-1]
        handle[0] = 50
        return 0

    def let_end(self) -> None:
        """Let all collectives end."""
        self._may_end = True

    def num_said(self, what: int) -> int:
        """Wire messages of a kind that it has sent."""
        return sum(HEADER.unpack_from(frame)[2] == what for frame in self.said)

    def turn(self) -> None:
        """Do all there is to do."""
        while self.engine.step(False):
            pass

    def arrive(self, tag: int, payload: bytes) -> None:
        """A short message from rank 1 on communicator 7."""
        self.coming.append(HEADER.pack(7, tag, What.MESSAGE, 0, 1, 0, 0, len(payload), 0) + payload)


def num_posted(half: _Half) -> int:
    """Bytes of what stands in rings."""
    starts = [65536 * (1 + slot) for slot in range(NUM_SLOTS)]
    posted, taken = (
        sum(struct.unpack_from("<I", half.lower._view, start + word)[0] for start in starts) for word in (POSTED, TAKEN)
    )
    return posted - taken


def _blocking(half: _Half, call: Any) -> Any:
    """What a call of the upper half gives, while the lower half turns."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    while thread.is_alive():
        half.turn()
        thread.join(0.001)
    return results[0]


@given(
    st.lists(
        st.tuples(st.sampled_from(["post", "arrive"]), st.integers(-1, 1), st.integers(-1, 2)), min_size=1, max_size=40
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_messages_and_receives_match_by_the_rule(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int, int]]
) -> None:
    half, oracle = _Half(str(tmp_path_factory.mktemp("engine") / "channel")), DumbMatching()
    port, met = Port(half.upper, 0), {}
    for index, (kind, source, tag) in enumerate(events):
        payload = str(index).encode()
        if kind == "post":
            assert port.start_receive(FIRST_POSTED + index, 7, source, tag, 100, 0)
            found = oracle.post(Posted(FIRST_POSTED + index, 7, source, tag))
            if found is not None:
                met[FIRST_POSTED + index] = found.payload
        else:
            source, tag = max(source, 0), max(tag, 0)
            if source == 0:
                assert port.post(7, 0, tag, payload)
            else:
                half.arrive(tag, payload)
            receive = oracle.arrive(Arrived(7, source, tag, len(payload), payload, 0))
            if receive is not None:
                met[receive.request] = payload
        half.turn()
    known = half.requests.by_number
    assert {number: request.payload for number, request in known.items() if request.done} == met
    assert [m.payload for m in half.matching.arrived] == [m.payload for m in oracle.arrived]
    assert [r.request for r in half.matching.posted] == [r.request for r in oracle.posted]
    assert half.engine.received == [0, sum(max(s, 0) == 1 for k, s, _ in events if k == "arrive")]


@given(st.lists(st.integers(0, 4096), max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_what_is_posted_is_sent_in_order_however_the_ring_wraps(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    half = _Half(str(tmp_path_factory.mktemp("engine") / "channel"))
    port = Port(half.upper, 3)
    for index, size in enumerate(sizes):
        payload = bytes([index % 251]) * size
        if not port.post(7, 1, index, payload):
            half.turn()
            assert port.post(7, 1, index, payload)
    half.turn()
    assert half.engine.sent == [0, len(sizes)] and half.engine.handed_over
    for index, size in enumerate(sizes):
        frame = half.sent[index]
        assert HEADER.unpack_from(frame) == (7, index, What.MESSAGE, 0, 0, 0, 0, size, 0)
        assert frame[HEADER.size :] == bytes([index % 251]) * size


def test_what_is_said_to_python_reaches_it_with_its_payload(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"))
    for what, payload in ((What.JOIN, b""), (What.ACCESSED, b"what was there"), (What.ACCESSED, b"")):
        half.coming.append(HEADER.pack(9, 5, what, 0, 1, 3, 17, len(payload), 64) + payload)
        half.turn()
        assert half.seen.pop() == (1, (9, 5, what, 17, len(payload), 3, 64), payload)
    half.coming.append(HEADER.pack(9, 5, What.ACCESSED, 0, 1, 3, 17, EAGER_BYTES + 1, 64))
    with pytest.raises(ValueError, match="longer than its frame"):
        half.turn()


def test_what_is_posted_and_not_taken_is_found_by_another_lower_half(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"))
    half.engine.set(True, 0)
    port = Port(half.upper, NUM_SLOTS - 1)
    assert port.post(7, 1, 5, b"abc") and port.start_receive(FIRST_POSTED, 7, ANY, 6, 8, 0x1000)
    half.turn()
    assert not half.sent
    half.engine.set(False, 0)
    half.turn()
    assert half.num_said(What.MESSAGE) == 1 and [one.request for one in half.matching.posted] == [FIRST_POSTED]


def test_who_asks_who_it_is_is_told_when_the_ranks_are_open(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"), rank=1)
    body = half.upper.bodies[4]
    BY_NAME["hello"].packer.pack_into(body, 0, BY_NAME["hello"].number)
    half.engine.set(True, 0)
    thread = threading.Thread(target=call_lower, args=(half.upper, 4), daemon=True)
    thread.start()
    while not half.lower.pending():
        time.sleep(0.001)
    half.turn()
    assert half.lower.pending() == 1 << 4
    half.engine.set(False, 0)
    half.turn()
    thread.join(60)
    assert not thread.is_alive() and HELLO_REPLY.unpack_from(body) == (0, 1, 2)


def test_a_blocking_receive_gets_its_message_and_a_wait_its_requests(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"))
    port, peers, into = Port(half.upper, 0), (0, 1), bytearray(4)
    half.arrive(3, b"abcd")
    assert _blocking(half, lambda: port.receive(7, peers, into, 1, 3)) == (1, 3, 4, 0)
    assert into == b"abcd"
    half.arrive(4, b"too long")
    source, tag, num_bytes, error = _blocking(half, lambda: port.receive(7, peers, into, ANY, ANY))
    assert (source, tag, num_bytes, into) == (1, 4, 8, b"too ") and error
    views = [memoryview(bytearray(2)), memoryview(bytearray(2))]
    for number, view in enumerate(views):
        assert port.start_receive(FIRST_POSTED + number, 7, 1, number, len(view), NATIVE.address_of(view))
    half.arrive(1, b"yz")
    half.arrive(0, b"wx")
    ended = _blocking(half, lambda: port.wait([FIRST_POSTED, FIRST_POSTED + 1], views))
    assert ended == [(1, 0, 2, 0, False), (1, 1, 2, 0, False)]
    assert [bytes(view) for view in views] == [b"wx", b"yz"]
    assert not half.requests.by_number and half.engine.waiting == 0


@given(st.lists(st.permutations(range(5)), min_size=1, max_size=3))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=NUM_COSTLY_EXAMPLES
)
def test_a_wait_for_all_ends_with_the_last_in_whatever_order_they_end(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[list[int]]
) -> None:
    half = _Half(str(tmp_path_factory.mktemp("engine") / "channel"))
    port = Port(half.upper, 0)
    for order in rounds:
        numbers, views = [FIRST_POSTED + tag for tag in range(5)], [memoryview(bytearray(1)) for _ in range(5)]
        for tag, number in enumerate(numbers):
            assert port.start_receive(number, 7, 1, tag, 1, NATIVE.address_of(views[tag]))
        ended: list[Any] = []
        thread = threading.Thread(target=lambda n=numbers, v=views, e=ended: e.append(port.wait(n, v)))
        thread.start()
        while not half.engine.waiting:
            half.turn()
        for tag in order:
            assert not ended and half.engine.waiting
            half.arrive(tag, bytes([tag]))
            half.turn()
        thread.join(60)
        assert [one[:3] for one in ended[0]] == [(1, tag, 1) for tag in range(5)]
        assert [view[0] for view in views] == list(range(5)) and not half.requests.by_number


def test_a_receive_that_waits_is_told_with_its_slot_and_goes_on_after_a_pause(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"))
    port, into = Port(half.upper, 2), bytearray(1)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(port.receive(7, (0, 1), into, 1, 0)))
    thread.start()
    while not half.engine.singles:
        half.turn()
    assert half.engine.singles == {2: 1}
    half.engine.set(True, 0)
    half.arrive(0, b"!")
    half.turn()
    assert half.requests.by_number[1].done and half.engine.singles == {2: 1}, "nothing is told while closed"
    half.engine.set(False, 0)
    half.turn()
    thread.join()
    assert results == [(1, 0, 1, 0)] and into == b"!"


def test_a_collective_is_counted_and_inside_until_the_library_has_ended_it(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"))
    port = Port(half.upper, 0)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(port.collective()))
    thread.start()
    while not half.engine.running:
        half.turn()
    assert ([(one.comm, number) for one, number, *_ in half.engine.running], half.entered) == ([(0, 1)], {0: 1})
    half.let_end()
    while thread.is_alive():
        half.turn()
        thread.join(0.001)
    assert results == [1] and half.engine.running == []


def test_a_collective_that_ends_while_the_rank_is_closed_is_told_when_it_is_open_again(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"))
    port = Port(half.upper, 0)
    thread = threading.Thread(target=port.collective)
    thread.start()
    while not half.engine.running:
        half.turn()
    half.engine.set(True, 0)
    half.let_end()
    half.turn()
    assert (half.entered, half.engine.running, half.lower.pending()) == ({0: 1}, [], 1)
    half.engine.set(False, 0)
    half.turn()
    thread.join()


def test_what_runs_is_shown_as_it_was_asked_for(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"))
    number = _blocking(half, lambda: Port(half.upper, 0).start_collective())
    ((request, *asked),) = half.engine.running
    assert (request.number, asked) == (number, [1, Kind.ALLGATHER, 0, 0, 0, b"x", 2])


def test_a_collective_that_is_started_is_waited_for_like_any_request(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"))
    port = Port(half.upper, 0)
    number = _blocking(half, lambda: port.start_collective())
    assert number and [one.comm for one, *_ in half.engine.running] == [0]
    half.let_end()
    assert _blocking(half, lambda: port.wait([number], [None]))[0][3:] == (0, False)
    assert _blocking(half, lambda: port.start_collective()) == 0, "over at once"


def test_a_run_comes_back_when_a_watched_request_is_over_and_watches_it_no_more(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"))
    stream = ctypes.c_uint64(50)
    assert not half.engine.run(2000, [ctypes.addressof(stream)])
    half.let_end()
    assert half.engine.run(1_000_000, [ctypes.addressof(stream)])
    assert not half.engine.run(2000, [])


def test_a_watched_request_stands_until_the_run_is_over_though_a_call_in_it_drops_the_request() -> None:
    """Gatherv, say, waits at its gate. The next collective of that communicator finds the gate passed, inside a run."""

    class Gate: ...

    class Engine:
        def step(self, news: bool) -> bool:
            return False

        def run(self, timeout_us: int, places: list[int]) -> bool:
            communicator.gate = None
            looked_at.append((places, place, gate() is not None))
            half.wake()
            return False

        def was_woken(self) -> None: ...

        def wake(self) -> None: ...

    looked_at: list[tuple[list[int], int, bool]] = []
    communicator = SimpleNamespace(gate=Gate())
    gate, place = weakref.ref(communicator.gate), id(communicator.gate)
    half: Any = object.__new__(MpiLowerHalf)
    half._wire = SimpleNamespace(address_of=id)
    half._collectives = object.__new__(Collectives)
    half._collectives._wire, half._collectives._running = half._wire, []
    half._collectives._communicators, half._collectives._gated = {7: communicator}, {7}
    half._collectives.poll = lambda: False
    half._engine = Engine()
    half._requests = SimpleNamespace(news=False)
    half._woken = half._progressed = half._closed = False
    half.serve_once(1.0)
    assert looked_at == [([place], place, True)]


def test_an_engine_that_may_spin_takes_a_call_and_ends_its_run_in_time(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"), always_spins=True)
    assert not half.engine.run(2000, [])
    assert Port(half.upper, 0).post(7, 1, 5, b"abc")
    assert not half.engine.run(2000, [])
    assert len(half.sent) == 1


def _two(folder: Path, arena: tuple[int, int] = (0, 0), *, near: bool = True) -> tuple[_Half, _Half]:
    """Two ranks, which can reach each other's memory if they are near; the programs of both are this process."""
    one, two = (_Half(str(folder / f"channel-{rank}"), rank=rank, arena=arena, near=near) for rank in (0, 1))
    one.other, two.other = two, one
    for half in (one, two):
        half.engine.attach(os.getpid())
    return one, two


def _both_turn(sender: _Half, receiver: _Half) -> None:
    for _ in range(10):
        sender.turn()
        receiver.turn()
        for one, other in ((sender, receiver), (receiver, sender)):
            other.coming.extend(one.sent)
            one.sent.clear()


def _send_long(half: _Half, source: Any, *, waits: bool) -> None:
    """Put a long send into slot 0 and ring; nobody waits for the reply."""
    flags = CallFlag.BLOCKING if waits else 0
    body = half.upper.bodies[0]
    fields = (flags, 7, 1 - half.rank, 3, len(source), NATIVE.address_of(source))
    BY_NAME["send"].packer.pack_into(body, 0, BY_NAME["send"].number, *fields)
    (number,) = struct.unpack_from("<I", half.upper._view, 65536)
    struct.pack_into("<I", half.upper._view, 65536, number + 1)
    ring(half.upper)


def _receive_long(half: _Half, target: Any, number: int = FIRST_POSTED) -> None:
    assert Port(half.upper, 0).start_receive(number, 7, -1, 3, len(target), NATIVE.address_of(target))


@given(
    sizes=st.tuples(st.sampled_from([40_000, 300_001, (1 << 20) + 7, (3 << 20) + 4096]), st.sampled_from([0, 5000])),
    who=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    shared=st.sampled_from(["none", "source", "target", "both"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_long_payload_is_carried_whole_and_nowhere_else(
    tmp_path_factory: pytest.TempPathFactory, sizes: tuple[int, int], who: tuple[bool, bool, bool], shared: str
) -> None:
    (num_bytes, more), (is_late, waits, near) = sizes, who
    both = memoryview(bytearray(os.urandom(num_bytes)) + bytearray(b"\xaa") * (num_bytes + more))
    source, target = both[:num_bytes], both[num_bytes:]
    place = {"none": None, "source": source, "target": target, "both": both}[shared]
    arena = (0, 0) if place is None else (NATIVE.address_of(place), len(place))
    sender, receiver = _two(tmp_path_factory.mktemp("carry"), arena, near=near)
    steps = [lambda: _send_long(sender, source, waits=waits), lambda: _receive_long(receiver, target)]
    for step in reversed(steps) if is_late else steps:
        step()
        _both_turn(sender, receiver)
    assert target[:num_bytes] == source and target[num_bytes:] == b"\xaa" * more
    request = receiver.requests.by_number[FIRST_POSTED]
    assert request.done and request.written and (request.source, request.message_bytes) == (0, num_bytes)
    # A send that is waited for is told with its slot, and forgotten.
    assert [one.done for one in sender.requests.by_number.values()] == ([] if waits else [True])
    assert sender.upper.pending() == 0 and not receiver.engine.carrying and not sender.seen + receiver.seen
    if not near:
        ahead = min(num_bytes, _PIECE_BYTES)
        num_ahead = 1 if shared in ("source", "both") else math.ceil(ahead / (_PIECE_BYTES // 2))
        num_wanted = math.ceil((num_bytes - ahead) / (num_bytes if shared == "both" else _PIECE_BYTES // 2))
        assert len(receiver.awaited) == num_ahead + num_wanted
        assert receiver.num_said(What.WANTED) == bool(num_wanted), "a piece goes without being wanted"


@pytest.mark.parametrize("near", [False, True])
def test_an_empty_synchronous_send_is_over_when_a_receive_has_matched(tmp_path: Path, near: bool) -> None:
    """Python announces it, as all that is not long."""
    sender, receiver = _two(tmp_path, near=near)
    request = sender.requests.start(kind=SEND, comm=7, peer=1, tag=3, address=0, num_bytes=0)
    pid = os.getpid() if near else 0
    receiver.coming.append(HEADER.pack(7, 3, What.ANNOUNCED, 0, 0, pid, request.number, 0, 0))
    _both_turn(sender, receiver)
    assert not request.done
    _receive_long(receiver, bytearray(50))
    _both_turn(sender, receiver)
    assert request.done and receiver.requests.by_number[FIRST_POSTED].done
    assert not sender.seen + receiver.seen and not sender.engine.carrying and not receiver.engine.carrying


@pytest.mark.parametrize("waits", [False, True])
def test_what_may_not_be_read_is_streamed_from_its_beginning_and_so_is_what_follows(
    tmp_path: Path, waits: bool
) -> None:
    sender, receiver = _two(tmp_path)
    pid = ctypes.c_int32(_NOBODY)
    source, target = bytearray(os.urandom(1 << 20)), bytearray(1 << 20)
    _receive_long(receiver, target)
    receiver.turn()
    _send_long(sender, source, waits=waits)
    sender.turn()
    # What it says of the process of its program is not so.
    frame = bytearray(sender.sent.pop())
    frame[20:24] = bytes(pid)
    receiver.coming.append(bytes(frame))
    _both_turn(sender, receiver)
    assert target == source and receiver.requests.by_number[FIRST_POSTED].done and receiver.num_said(What.WANTED)
    _receive_long(receiver, target, FIRST_POSTED + 1)
    _send_long(sender, source, waits=False)
    _both_turn(sender, receiver)
    assert target == source and receiver.num_said(What.TAKEN) == 0 and not receiver.seen


def test_a_sender_that_may_not_write_there_leaves_its_half_to_the_receiver(tmp_path: Path) -> None:
    source, target = bytearray(os.urandom(1 << 20)), bytearray(1 << 20)
    sender, receiver = _two(tmp_path, (NATIVE.address_of(target), len(target)))
    receiver.engine.attach(_NOBODY)
    _receive_long(receiver, target)
    _send_long(sender, source, waits=True)
    _both_turn(sender, receiver)
    assert target == source and sender.upper.pending() == 0


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("is_begun", [False, True])
def test_closing_lets_a_payload_end_that_has_begun_and_no_other_begin(
    tmp_path: Path, is_begun: bool, near: bool
) -> None:
    sender, receiver = _two(tmp_path, near=near)
    source, target = bytearray(os.urandom(3 << 20)), bytearray(3 << 20)
    _receive_long(receiver, target)
    receiver.turn()
    _send_long(sender, source, waits=True)
    sender.turn()
    receiver.coming.extend(sender.sent)
    sender.sent.clear()
    if is_begun:
        assert receiver.engine.step(False) and receiver.engine.carrying
    is_ahead = not near and not is_begun
    for half in (sender, receiver):
        half.engine.set(True, 0)
    _both_turn(sender, receiver)
    assert not receiver.engine.carrying and not sender.engine.carrying
    assert (target == source) is is_begun and not receiver.pieces
    assert sender.num_said(What.GIVEN_UP) == is_ahead
    # What has not begun is owed; what has ended is told when the channel is open again.
    assert len(receiver.owed) == (0 if is_begun else 1)
    assert sender.upper.pending() == 1
    sender.engine.set(False, 0)
    sender.turn()
    assert sender.upper.pending() == (0 if is_begun else 1)


def _call_on(core: int, call: Callable[[], object]) -> None:
    """A call of a program that runs on this core, which need not be one of its lower half's."""

    def on_core() -> None:
        os.sched_setaffinity(0, {core})
        call()

    thread = threading.Thread(target=on_core)
    thread.start()
    thread.join()


def _ring_from(half: _Half, core: int) -> None:
    """A short send."""
    _call_on(core, lambda: Port(half.upper, 0).post(7, 0, 1, b"x"))


def _program_states(half: _Half, num_calls: int, calls_without: int) -> Counter[int]:
    """How the lower half stood whenever one of so many receives had ended, both on one core.

    Whoever else computes on that core makes calls go without giving way for a while: each begins anew here.
    """
    allowed, states = os.sched_getaffinity(0), Counter[int]()
    view = half.upper._view
    sleeping, without = view[128:132].cast("I"), view[72:76].cast("I")
    port, into = Port(half.upper, 0), bytearray(1)

    def program() -> None:
        os.sched_setaffinity(0, {min(allowed)})
        for _ in range(num_calls):
            without[0] = calls_without
            assert port.receive(7, (0, 1), into, 1, 0) == (1, 0, 1, 0)
            states[sleeping[0]] += 1

    for _ in range(num_calls):
        half.arrive(0, b"x")
    thread = threading.Thread(target=program, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline_s:
        half.engine.run(50_000, [])
    thread.join(60)
    os.sched_setaffinity(0, allowed)
    return states


def test_a_lower_half_gives_way_while_calls_are_dense_and_sleeps_while_a_third_computes(tmp_path: Path) -> None:
    """One burst may meet others on this core, and threads of one Python take turns: bursts until it is seen.

    Each with an engine of its own: one that met others keeps away from the core, and would meet the next burst so.
    """
    dense, deadline_s = Counter[int](), time.monotonic() + 60
    for number in itertools.count():
        assert time.monotonic() < deadline_s, dense
        half = _Half(str(tmp_path / f"channel-{number}"), give_way_us=10_000)
        half.lower.set_pace(0, 10_000)
        dense = _program_states(half, num_calls=100, calls_without=0)
        assert dense.total() == 100
        if dense[_GIVES_WAY]:
            break
    apart = _program_states(half, num_calls=10, calls_without=1000)
    assert apart.total() == 10 and apart[_GIVES_WAY] == 0


@pytest.mark.parametrize(
    ("told", "own", "stays"), [(None, min, False), (min, min, False), (max, min, True), (max, max, False)]
)
def test_an_engine_that_copies_goes_to_its_share_of_the_cores_unless_programs_have_shared_them_otherwise(
    tmp_path: Path, told: Callable[[set[int]], int] | None, own: Callable[[set[int]], int], stays: bool
) -> None:
    """What the other rank has told: nothing, that its program stands on the same core, or on this one's share.

    Or this one's own stands there by now, too: two lower halves must not stay on the core that their programs left.
    """
    allowed = os.sched_getaffinity(0)
    core = 0 if told is None else told(allowed) + 1
    half = _Half(str(tmp_path / "channel"), seat=(max(allowed), 1000))
    try:
        _ring_from(half, min(allowed))
        half.engine.run(3000, [])
        assert os.sched_getaffinity(0) == {min(allowed)}
        half.engine.attach(_NOBODY)
        into = bytearray(1 << 20)
        place = NATIVE.address_of(into)
        _call_on(own(allowed), lambda: Port(half.upper, 0).start_receive(FIRST_POSTED, 7, 1, 0, len(into), place))
        half.coming.append(HEADER.pack(7, 0, What.ANNOUNCED, core, 1, _NOBODY, 5, len(into), 0x1000))
        half.engine.step(False)
        assert os.sched_getaffinity(0) == {min(allowed) if stays else max(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)


def test_an_engine_rests_on_the_programs_core_until_it_is_closed_and_never_beyond_its_own(tmp_path: Path) -> None:
    half, allowed = _Half(str(tmp_path / "channel")), os.sched_getaffinity(0)
    try:
        for core in allowed:
            _ring_from(half, core)
            half.engine.run(3000, [])
            assert os.sched_getaffinity(0) == {core}
        half.engine.set(True, 0)
        assert os.sched_getaffinity(0) == allowed, "who writes an image may run anywhere"
        half.engine.set(False, 0)
        os.sched_setaffinity(0, {min(allowed)})
        for core in allowed:
            _ring_from(half, core)
            half.engine.run(3000, [])
            assert os.sched_getaffinity(0) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)
