"""Windows: memory of the upper half that other ranks read and write without its knowing when.

No window of the real MPI is used. An origin's lower half sends an access to the target's, which carries it out on its
program's memory and answers; the program computes on meanwhile.

    origin    ACCESS (runs, data) ─────>  target: checks the bounds, folds, writes
              data, or an error  <─────── ACCESSED
    origin    LOCK  ───────────────────>  target: a queue for each window
              <────────────────── LOCKED  when it is the origin's turn
    origin    UNLOCK ──────────────────>  (no answer: the origin has waited for its accesses before)

The engine is the target of all (``_engine_windows.c``, ``_engine_locks.c``), and the origin of short accesses of one
run. Here is the origin of the others: they go in chunks, in order, with at most CHUNKS_UNDER_WAY of them not answered
yet by one target. All messages are counted, and what has begun ends while closed: a checkpoint finds no access half
done. A lock that is waited for is state, at both ends, and so are the windows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from remesh.carried.mpi.calls.wire_messages import What
from remesh.carried.mpi.lower.accesses import COMPARE_AND_SWAP, NO_OP, AccessChunk, Runs, Verb, cut, pack_runs
from remesh.carried.mpi.lower.exposure import Exposure
from remesh.carried.mpi.lower.numbered import Numbered
from remesh.carried.mpi.lower.requests import WINDOW, Requests
from remesh.carried.mpi.lower.upper_memory import UpperMemory
from remesh.carried.mpi.lower.wire import Wire

CHUNKS_UNDER_WAY: Final = 8
"""Limit for each target: enough to keep a network busy, and a bound for what waits in its MPI."""
Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Operands:
    """The two ends of an access: its target, and the buffers of the origin's program."""

    window: int
    target: int  # world rank
    data: int | bytes  # the data, or their address, where they are read while the access is under way
    data_bytes: int  # 0: the operation takes none
    result: int  # address of what is fetched


@dataclass(slots=True)
class _Access:
    """An access of this rank's program that is not over."""

    request: Any
    operands: Operands
    verb: Verb
    chunks: deque[AccessChunk]  # not sent yet
    unanswered: int = 0


class Windows:
    """The windows of a rank, and the long accesses of its program to others'."""

    def __init__(self, wire: Wire, memory: UpperMemory, requests: Requests) -> None:
        self._wire, self._memory, self._requests = wire, memory, requests
        self.windows = Numbered[Exposure]()
        self.accesses = Numbered[_Access | None]()
        """Accesses that are not over, by the number of their request; None for those of the engine."""
        self.queues = Numbered[deque[_Access]]()
        """Accesses with chunks to send, by target, in order. The engine overtakes none."""
        self._under_way: dict[int, int] = {}
        """Number of chunks without an answer, by target."""

    @property
    def is_busy(self) -> bool:
        """Whether an access of this rank is under way."""
        return bool(self.accesses)

    def access(self, operands: Operands, verb: Verb, runs: Runs, unit: int, number: int = 0) -> Any:
        """Start an access; ``unit`` is the bytes of an element, ``number`` is chosen by the upper half, or 0."""
        num_bytes = sum(length for _, length in runs)
        request = self._requests.start(
            kind=WINDOW,
            comm=operands.window,
            peer=operands.target,
            tag=0,
            address=operands.result,
            num_bytes=num_bytes,
            number=number,
        )
        request.written, request.message_bytes = verb.fetches, num_bytes
        access = _Access(request, operands, verb, deque(cut(runs, unit)))
        if not access.chunks:
            self._requests.complete(request)
            return request
        self.accesses[request.number] = access
        self.queues.setdefault(operands.target, deque()).append(access)
        self._send_on(operands.target)
        return request

    def _send_on(self, target: int) -> None:
        """Send as many chunks to a target as it may have."""
        queue = self.queues[target]
        while queue and self._under_way.get(target, 0) < CHUNKS_UNDER_WAY:
            access = queue[0]
            chunk = access.chunks.popleft()
            if not access.chunks:
                queue.popleft()
            access.unanswered += 1
            self._send(access, chunk)

    def _send(self, access: _Access, chunk: AccessChunk) -> None:
        window, target, word = access.operands.window, access.operands.target, access.verb.pack()
        payload = pack_runs(chunk.runs) + self._data_of(access, chunk)
        if target == self._wire.rank:
            self._hear_answer(access, chunk.position, *self._wire.engine.access(window, word, len(chunk.runs), payload))
            return
        self._under_way[target] = self._under_way.get(target, 0) + 1
        fields = (window, word, What.ACCESS, access.request.number, len(payload), len(chunk.runs), chunk.position)
        self._wire.send(target, fields, payload)

    def _data_of(self, access: _Access, chunk: AccessChunk) -> Data:
        operands = access.operands
        if access.verb.op == NO_OP:
            return b""
        start, length = chunk.position, chunk.num_bytes
        if access.verb.op == COMPARE_AND_SWAP:
            start, length = 0, operands.data_bytes
        if isinstance(operands.data, bytes):
            return operands.data[start : start + length]
        return self._memory.read(operands.data + start, length)

    def hear_accessed(self, source: int, fields: tuple[Any, ...], payload: Data) -> None:
        """Handle the answer to an access."""
        _, error, _, request, _, _, position = fields
        access = self.accesses.get(request)
        if access is None or access.operands.target != source:
            raise ValueError(
                f"rank {source} answers access {request}, which is not under way to it; run one version of remesh "
                "on all ranks"
            )
        self._under_way[source] -= 1
        self._hear_answer(access, position, error, payload)
        self._send_on(source)

    def _hear_answer(self, access: _Access, position: int, error: int, old: Data) -> None:
        access.unanswered -= 1
        if error:
            access.request.error = error
        elif access.verb.fetches:
            self._memory.write(access.operands.result + position, old)
        if not access.unanswered and not access.chunks:
            del self.accesses[access.request.number]
            self._requests.complete(access.request)
