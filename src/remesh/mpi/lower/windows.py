"""Windows: memory of the upper half that other ranks read and write without its knowing when.

No window of the real MPI is used. An origin's lower half sends an access to the target's, which carries it out on its
program's memory and answers; the program computes on meanwhile.

    origin    ACCESS (runs, data) ─────>  target: checks the bounds, folds, writes
              data, or an error  <─────── ACCESSED
    origin    LOCK  ───────────────────>  target: a queue for each window
              <────────────────── LOCKED  when it is the origin's turn
    origin    UNLOCK ──────────────────>  (no answer: the origin has waited for its accesses before)

The engine does the same for short accesses of one run, on the same tables (``_engine_windows.c``), and for locks that
nobody waits for (``_engine_locks.c``).

Accesses of one origin to one target are carried out in order, chunk by chunk, with at most CHUNKS_UNDER_WAY chunks of
Python's not answered yet. All messages are counted, and what has begun ends while closed: a checkpoint finds no access
half done. A lock that is waited for is state, at both ends, and so are the windows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from remesh.mpi.calls.error_classes import CLASSES
from remesh.mpi.calls.table import EAGER_BYTES, RUN
from remesh.mpi.lower.accesses import (
    COMPARE_AND_SWAP,
    NO_OP,
    REPLACE,
    Chunk,
    Data,
    Runs,
    Verb,
    cut,
    pack_runs,
    unpack_runs,
)
from remesh.mpi.lower.exposure import Asker, Window
from remesh.mpi.lower.folding import Folder
from remesh.mpi.lower.requests import SUCCESS, WINDOW, Request, Requests
from remesh.mpi.lower.upper_memory import UpperMemory
from remesh.mpi.lower.wire import What, Wire

CHUNKS_UNDER_WAY: Final = 8
"""To each target: enough to keep a network busy, and a bound for what waits in its MPI."""
ASKS_FOR_LOCK: Final = 1
"""Tag of a request; that of an access is 0."""
_ERR_RMA_RANGE: Final = CLASSES["ERR_RMA_RANGE"]
_ERR_WIN: Final = CLASSES["ERR_WIN"]
_ERR_OP: Final = CLASSES["ERR_OP"]
_ERR_OTHER: Final = CLASSES["ERR_OTHER"]


@dataclass(frozen=True, slots=True)
class Place:
    """What an access is to, and what it works with in the origin's program."""

    window: int
    target: int  # world rank
    data: int | bytes  # the data, or their address, where they are read while the access is under way
    data_bytes: int  # 0: the operation takes none
    result: int  # address of what is fetched


@dataclass(slots=True)
class _Access:
    """An access of this rank's program that is not over."""

    request: Request
    place: Place
    verb: Verb
    chunks: deque[Chunk]  # not sent yet
    unanswered: int = 0


class Windows:
    """The windows of a rank: what its program asks for, and what other ranks ask of it."""

    def __init__(self, mpi: Any, wire: Wire, memory: UpperMemory, requests: Requests) -> None:
        self._wire, self._memory, self._requests = wire, memory, requests
        self._folder = Folder(mpi)
        self._mpi_error: type[Exception] = mpi.Exception
        self.windows: dict[int, Window] = {}
        self.accesses: dict[int, _Access | None] = {}
        """Accesses that are not over, by the number of their request; None for those of the engine."""
        self.queues: dict[int, deque[_Access]] = {}
        """By target, in order: those with chunks to send. The engine overtakes none."""
        self._under_way: dict[int, int] = {}
        """By target: chunks without an answer."""

    @property
    def is_busy(self) -> bool:
        """Whether an access of this rank is under way."""
        return bool(self.accesses)

    # What the upper half asks for.

    def access(self, place: Place, verb: Verb, runs: Runs, unit: int, number: int = 0) -> Request:
        """Start an access; ``unit`` is the bytes of an element. With a number that the upper half has chosen, or 0."""
        num_bytes = sum(length for _, length in runs)
        request = self._start(place.window, place.target, place.result, num_bytes, number)
        request.written, request.message_bytes = verb.fetches, num_bytes
        access = _Access(request, place, verb, deque(cut(runs, unit)))
        if not access.chunks:
            self._requests.complete(request)
            return request
        self.accesses[request.number] = access
        self.queues.setdefault(place.target, deque()).append(access)
        self._send_on(place.target)
        return request

    def lock(self, window: int, target: int, *, exclusive: bool) -> Request:
        """Ask for the lock of a window on one rank; the request completes when it is there."""
        request = self._start(window, target, 0, 0)
        request.tag = ASKS_FOR_LOCK
        if target == self._wire.rank:
            self._tell_granted(window, self.windows[window].locks.ask(Asker(target, exclusive, request.number)))
        else:
            self._wire.send(target, (window, int(exclusive), What.LOCK, request.number, 0, 0, 0))
        return request

    def unlock(self, window: int, target: int) -> None:
        """Give a lock back."""
        if target == self._wire.rank:
            self._tell_granted(window, self.windows[window].locks.release(target))
        else:
            self._wire.send(target, (window, 0, What.UNLOCK, 0, 0, 0, 0))

    def _start(self, window: int, target: int, address: int, num_bytes: int, number: int = 0) -> Request:
        return self._requests.start(
            kind=WINDOW, comm=window, peer=target, tag=0, address=address, num_bytes=num_bytes, number=number
        )

    # As an origin.

    def _send_on(self, target: int) -> None:
        """Send chunks to a target as far as it may have more of them."""
        queue = self.queues[target]
        while queue and self._under_way.get(target, 0) < CHUNKS_UNDER_WAY:
            access = queue[0]
            chunk = access.chunks.popleft()
            if not access.chunks:
                queue.popleft()
            access.unanswered += 1
            self._send(access, chunk)

    def _send(self, access: _Access, chunk: Chunk) -> None:
        place, data = access.place, self._data_of(access, chunk)
        if place.target == self._wire.rank:
            self._hear_answer(access, chunk.position, *self._carry_out(place.window, access.verb, chunk.runs, data))
            return
        self._under_way[place.target] = self._under_way.get(place.target, 0) + 1
        payload = pack_runs(chunk.runs) + data
        word, number = access.verb.pack(), access.request.number
        fields = (place.window, word, What.ACCESS, number, len(payload), len(chunk.runs), chunk.position)
        self._wire.send(place.target, fields, payload)

    def _data_of(self, access: _Access, chunk: Chunk) -> Data:
        place = access.place
        if access.verb.op == NO_OP:
            return b""
        start, length = chunk.position, chunk.num_bytes
        if access.verb.op == COMPARE_AND_SWAP:
            start, length = 0, place.data_bytes
        if isinstance(place.data, bytes):
            return place.data[start : start + length]
        return self._memory.read(place.data + start, length)

    def _hear_answer(self, access: _Access, position: int, error: int, old: Data) -> None:
        access.unanswered -= 1
        if error:
            access.request.error = error
        elif access.verb.fetches:
            self._memory.write(access.place.result + position, old)
        if not access.unanswered and not access.chunks:
            del self.accesses[access.request.number]
            self._requests.complete(access.request)

    # As a target.

    def _carry_out(self, number: int, verb: Verb, runs: Runs, data: Data) -> tuple[int, bytes | bytearray]:
        """Do it; the error class and what was there before, if the access fetches it."""
        window = self.windows.get(number)
        if window is None:
            return _ERR_WIN, b""
        if not window.holds(runs):
            return _ERR_RMA_RANGE, b""
        try:
            old = bytearray()
            if verb.fetches or verb.op not in (REPLACE, NO_OP):
                old = bytearray().join(self._memory.read(window.base + offset, length) for offset, length in runs)
            if verb.op != NO_OP:
                room = old if verb.op != REPLACE else bytearray(sum(length for _, length in runs))
                self._write(window.base, runs, memoryview(self._folder.fold(verb, room, data)))
        except self._mpi_error:
            return _ERR_OP, b""
        except (OSError, ValueError):
            return _ERR_OTHER, b""
        return SUCCESS, old if verb.fetches else b""

    def _write(self, base: int, runs: Runs, new: memoryview) -> None:
        position = 0
        for offset, length in runs:
            self._memory.write(base + offset, new[position : position + length])
            position += length

    def _tell_granted(self, window: int, granted: list[Asker]) -> None:
        for asker in granted:
            if asker.rank == self._wire.rank:
                self._requests.complete(self._requests.by_number[asker.request])
            else:
                self._wire.send(asker.rank, (window, SUCCESS, What.LOCKED, asker.request, 0, 0, 0))

    # What comes from the others.

    def on_message(self, source: int, fields: tuple[Any, ...], payload: Data) -> None:
        """A wire message about a window has come."""
        number, word, what, request, _, num_runs, position = fields
        if what == What.ACCESS:
            error, old = self._serve(number, word, num_runs, payload)
            self._wire.send(source, (number, error, What.ACCESSED, request, len(old), 0, position), old)
        elif what == What.ACCESSED:
            access = self.accesses.get(request)
            if access is None or access.place.target != source:
                raise ValueError(
                    f"rank {source} answers access {request}, which is not under way to it; run one version of remesh "
                    "on all ranks"
                )
            self._under_way[source] -= 1
            self._hear_answer(access, position, word, payload)
            self._send_on(source)
        elif what == What.LOCKED:
            locked = self._requests.by_number[request]
            locked.error = word
            self._requests.complete(locked)
        elif number in self.windows:
            locks = self.windows[number].locks
            asker = Asker(source, bool(word), request)
            self._tell_granted(number, locks.ask(asker) if what == What.LOCK else locks.release(source))
        elif what == What.LOCK:
            self._wire.send(source, (number, _ERR_WIN, What.LOCKED, request, 0, 0, 0))
        # What is left gives back the lock of a window that has been freed since: it went with the window.

    def _serve(self, number: int, word: int, num_runs: int, payload: Data) -> tuple[int, bytes | bytearray]:
        try:
            verb, runs = Verb.unpack(word), unpack_runs(payload, num_runs)
            if sum(length for _, length in runs) > EAGER_BYTES:
                raise ValueError("more bytes than an answer has room for")
        except ValueError:
            return _ERR_OTHER, b""
        return self._carry_out(number, verb, runs, payload[num_runs * RUN.size :])
