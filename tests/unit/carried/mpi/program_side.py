"""The program's side of a channel, for tests of lower halves: posts calls and waits for replies."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from remesh.carried.mpi.calls.table import (
    BY_NAME,
    COMPLETION,
    INDEX,
    REQUEST_REPLY,
    WAIT_REPLY,
    CallFlag,
    Kind,
    PayloadPlace,
    WaitFor,
)
from remesh.carried.mpi.calls.words import FIRST_SLOT, POSTED, RING, RING_BYTES, STRIDE, TAKEN
from remesh.carried.mpi.channel import SharedChannel
from remesh.carried.mpi.native import NATIVE
from tests.unit.carried.mpi.fake_mpi import call_lower, ring

_SKIP = 0xFFFFFFFF
_ALLGATHER = (Kind.ALLGATHER, 0, 0, 0, 0, 0, 1, 0, 2, 0)
"""Fields of a collective behind its flags."""


class Port:
    """One slot of a channel."""

    def __init__(self, channel: SharedChannel, slot: int) -> None:
        self._channel, self._slot = channel, slot
        self._start = FIRST_SLOT + slot * STRIDE
        self._body = channel.bodies[slot]

    def _word(self, offset: int) -> memoryview:
        return self._channel._view[self._start + offset : self._start + offset + 4].cast("I")

    def put(self, name: str, fields: Sequence[int], tail: bytes = b"") -> bool:
        """Post a call that nobody answers; False if the ring has no room."""
        row = BY_NAME[name]
        call = row.packer.pack(row.number, *fields) + tail
        posted, taken = self._word(POSTED), self._word(TAKEN)
        whole, at = (len(call) + 4 + 7) & ~7, posted[0] % RING_BYTES
        skipped = RING_BYTES - at if RING_BYTES - at < whole else 0
        if RING_BYTES - (posted[0] - taken[0]) < whole + skipped:
            return False
        ring_start, view = self._start + RING, self._channel._view
        if skipped:
            struct.pack_into("<I", view, ring_start + at, _SKIP)
            at = 0
        struct.pack_into("<I", view, ring_start + at, whole)
        view[ring_start + at + 4 : ring_start + at + 4 + len(call)] = call
        posted[0] += skipped + whole
        ring(self._channel)
        return True

    def post(self, comm: int, dest: int, tag: int, payload: Any) -> bool:
        """A short send."""
        return self.put("send", (CallFlag.INLINE, comm, dest, tag, len(payload), 0), bytes(payload))

    def start_receive(self, number: int, comm: int, source: int, tag: int, capacity: int, address: int) -> bool:
        """A receive that is waited for later."""
        return self.put("start_receive", (number, comm, source, tag, capacity, address if capacity else 0))

    def ask(self, name: str, fields: Sequence[int], tail: bytes = b"") -> int:
        """A call; the status of its reply, which stands in the body."""
        row = BY_NAME[name]
        row.packer.pack_into(self._body, 0, row.number, *fields)
        self._body[row.packer.size : row.packer.size + len(tail)] = tail
        call_lower(self._channel, self._slot)
        return int(self._body[0])

    def receive(self, comm: int, peers: object, into: bytearray, source: int, tag: int) -> tuple[int, ...]:
        """Wait for a message: source, tag, bytes, error."""
        status = self.ask(
            "receive", (CallFlag.BLOCKING, comm, source, tag, len(into), NATIVE.address_of(into) if into else 0)
        )
        assert status == 0, bytes(self._body[:100])
        ended, _ = self._take(REQUEST_REPLY.size, memoryview(into))
        return ended[:4]

    def wait(self, numbers: Sequence[int], views: Sequence[memoryview | None]) -> list[tuple[Any, ...]]:
        """Wait for all: source, tag, bytes, error, whether it was cancelled, of each."""
        fields = (CallFlag.BLOCKING, WaitFor.ALL, len(numbers))
        assert self.ask("wait", fields, struct.pack(f"<{len(numbers)}Q", *numbers)) == 0
        at, ended = WAIT_REPLY.size, []
        for view in views:
            one, at = self._take(at + INDEX.size, view)
            ended.append(one)
        return ended

    def collective(self) -> int:
        """A gathering of a byte of each of two ranks to both; 1 when it is over."""
        assert self.ask("collective", (CallFlag.BLOCKING | CallFlag.INLINE, *_ALLGATHER), b"x") == 0
        return 1

    def start_collective(self) -> int:
        """The same, waited for later: its request, or 0 if it is over."""
        assert self.ask("collective", (CallFlag.INLINE, *_ALLGATHER), b"x") == 0
        return int(REQUEST_REPLY.unpack_from(self._body)[1])

    def _take(self, at: int, view: memoryview | None) -> tuple[tuple[Any, ...], int]:
        source, tag, num_bytes, error, where, _ = COMPLETION.unpack_from(self._body, at)
        at += COMPLETION.size
        if where == PayloadPlace.INLINE and view is not None:
            length = min(num_bytes, len(view))
            view[:length] = self._body[at : at + length]
            at += length
        return (source, tag, num_bytes, error, where == PayloadPlace.CANCELLED), at
