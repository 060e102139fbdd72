"""Small reductions to all, and barriers: messages of our own instead of the real MPI's collectives.

A lower half may not block, and the non-blocking collectives of some libraries cost several latencies over a network.
Here each step of :mod:`remesh.mpi.lower.exchange_pattern` is one wire message::

    PART (communicator, clock: which of its collectives)  ──>  waits for the step that takes it, or is taken at once

No peer is taken from twice in a collective, so communicator, clock and source name a part. All members have entered
before anyone is through, so where nobody is inside a collective no part is on its way or waits. Which collectives go
this way must be the same on all ranks: that depends on what MPI wants to be the same, and on nothing else. No real
communicator is needed. The engine does the same in C (``_engine_doubling.c``), by the same plans.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from remesh.mpi.calls.error_classes import CLASSES
from remesh.mpi.lower.exchange_pattern import Do, plan_doubling
from remesh.mpi.lower.requests import Request, Requests
from remesh.mpi.lower.wire import What, Wire

SMALL_BYTES: Final = 2048
"""Longer operands go the real MPI's way: from some size on it cuts them, and sends less."""
STEP: Final = struct.Struct("<ii")
"""A step of a plan: what to do, world rank of the peer."""
ERR_TRUNCATE: Final = CLASSES["ERR_TRUNCATE"]
ERR_OP: Final = CLASSES["ERR_OP"]


def pack_plan(members: Sequence[int], rank: int) -> bytes:
    """The steps of world rank ``rank`` in a communicator."""
    return b"".join(STEP.pack(step.do, step.peer) for step in plan_doubling(members, members.index(rank)))


@dataclass(slots=True)
class Fold:
    """How operands are folded: an operation and a datatype of the real MPI; neither for a barrier."""

    op: Any = None
    datatype: Any = None

    def __call__(self, before: bytes | bytearray, after: bytearray) -> None:
        """Fold two operands into the second."""
        if before:
            self.op.Reduce_local([before, self.datatype], [after, self.datatype])


@dataclass(slots=True)
class _Running:
    request: Request
    clock: int  # collectives entered before, on its communicator
    steps: list[tuple[int, int]]  # those left
    mine: bytearray  # folded so far
    fold: Fold


@dataclass(frozen=True, slots=True)
class _Part:
    error: int  # MPI's class: what the peer's fold so far met; 0 for nothing
    payload: bytes


class Doublings:
    """Collectives of this kind that a rank is inside of, for a lower half without engine."""

    def __init__(self, mpi_error: type[Exception], wire: Wire, requests: Requests) -> None:
        self._mpi_error, self._wire, self._requests = mpi_error, wire, requests
        self._running: list[_Running] = []
        self._parts: dict[tuple[int, int, int], _Part] = {}

    @property
    def inside(self) -> set[int]:
        """Communicators of those that are not complete."""
        return {one.request.comm for one in self._running}

    def start(
        self, request: Request, clock: int, plan: bytes, fold: Fold, operand: bytes | bytearray | memoryview
    ) -> None:
        """Enter one; the request completes with the fold of all operands as its payload."""
        one = _Running(request, clock, list(STEP.iter_unpack(plan)), bytearray(operand), fold)
        if not self._advance(one):
            self._running.append(one)

    def on_part(self, source: int, fields: tuple[Any, ...], payload: bytes | memoryview) -> None:
        """What a peer has folded so far."""
        comm, error, _, clock, *_ = fields
        self._parts[comm, clock, source] = _Part(error, bytes(payload))
        self._running = [one for one in self._running if not self._advance(one)]

    def _advance(self, one: _Running) -> bool:
        """Do what can be done; whether it is complete."""
        request = one.request
        while one.steps:
            do, peer = one.steps[0]
            if do == Do.GIVE:
                fields = (request.comm, request.error, What.PART, one.clock, len(one.mine), 0, 0)
                self._wire.send(peer, fields, bytes(one.mine))
            else:
                part = self._parts.pop((request.comm, one.clock, peer), None)
                if part is None:
                    return False
                self._take(one, do, part)
            del one.steps[0]
        request.payload, request.message_bytes = one.mine, len(one.mine)
        self._requests.complete(request)
        return True

    def _take(self, one: _Running, do: int, part: _Part) -> None:
        request = one.request
        if part.error or len(part.payload) != len(one.mine):
            # Given on with the next parts: all members raise.
            request.error = request.error or part.error or ERR_TRUNCATE
            return
        theirs = bytearray(part.payload)
        try:
            if do == Do.FOLD_BEFORE:
                one.fold(theirs, one.mine)
            else:
                if do == Do.FOLD_AFTER:
                    one.fold(one.mine, theirs)
                one.mine = theirs
        except self._mpi_error:
            request.error = ERR_OP
