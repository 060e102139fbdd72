"""One dispatcher for all calls that the engine leaves to Python: what each does, and how its reply is laid out.

A handler writes its reply, or says for which request the slot waits; the engine then tells how that ended.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, Final

from remesh.carried.mpi.calls.error_classes import CLASSES
from remesh.carried.mpi.calls.table import (
    BY_NAME,
    BY_NUMBER,
    COMPLETION,
    EAGER_BYTES,
    FAILED,
    FAILURE,
    INDEX,
    MAX_COUNTS,
    OK,
    PARCEL,
    PROBE_REPLY,
    REQUEST_REPLY,
    WAIT_REPLY,
    CallFlag,
    Kind,
    PayloadPlace,
    WaitFor,
)
from remesh.carried.mpi.calls.words import BODY_BYTES
from remesh.carried.mpi.lower.accesses import Verb, unpack_runs
from remesh.carried.mpi.lower.collectives import Collectives
from remesh.carried.mpi.lower.exposure import Exposure
from remesh.carried.mpi.lower.real_collectives import CollectiveCall
from remesh.carried.mpi.lower.requests import SEND, Requests
from remesh.carried.mpi.lower.transfers import MessageTransfers
from remesh.carried.mpi.lower.upper_memory import UpperMemory
from remesh.carried.mpi.lower.windows import Operands, Windows

ERR_OTHER: Final = CLASSES["ERR_OTHER"]
ERR_REQUEST: Final = CLASSES["ERR_REQUEST"]
REPLIED: Final = 0
BLOCKED: Final = -1
"""The result of a handler if the slot waits for no request; above 0, a result is the number of the request."""

OF_ENGINE: Final = frozenset({"hello", "send", "receive", "wait", "start_receive", "start_access", "lock", "unlock"})
"""Calls without a handler here; ``start_access`` comes from rings alone."""
_KINDS: Final = tuple(Kind)


class Serving:
    """The handlers of requests in slot bodies."""

    def __init__(
        self,
        transfers: MessageTransfers,
        collectives: Collectives,
        windows: Windows,
        memory: UpperMemory,
        requests: Requests,
    ) -> None:
        self.transfers, self.collectives, self.windows = transfers, collectives, windows
        self.memory, self.requests = memory, requests
        self.parcels: dict[int, bytes | bytearray] = {}
        """Payloads of messages of unknown size, until they are fetched."""
        self.next_parcel = 1
        self.description: dict[str, Any] = {}
        self.finished = False
        self.abort_code: int | None = None
        self._handlers: dict[int, Callable[..., int]] = {
            number: getattr(self, f"_{call.name}") for number, call in BY_NUMBER.items() if call.name not in OF_ENGINE
        }

    def serve(self, slot: int, body: memoryview) -> int:
        """Serve the request in a slot's body; returns REPLIED, BLOCKED, or the request that the slot waits for."""
        handler = self._handlers.get(body[0])
        if handler is None:
            return fail(body, ERR_OTHER, f"serving slot {slot}: there is no call number {body[0]}")
        call = BY_NUMBER[body[0]]
        try:
            return handler(slot, body, *call.packer.unpack_from(body)[1:])
        except self.collectives.mpi_error as error:
            return fail(body, ERR_OTHER, f"{call.name} on the real MPI: {error}")
        except (KeyError, ValueError, OSError, struct.error) as error:
            return fail(body, ERR_OTHER, f"serving {call.name}: {type(error).__name__}: {error}")

    # Rows of the table.

    def _describe(self, slot: int, body: memoryview) -> int:
        text = json.dumps(self.description).encode()
        INDEX.pack_into(body, 1, len(text))
        body[0] = OK
        body[1 + INDEX.size : 1 + INDEX.size + len(text)] = text
        return REPLIED

    def _finish(self, slot: int, body: memoryview) -> int:
        self.finished = True
        body[0] = OK
        return REPLIED

    def _abort(self, slot: int, body: memoryview, code: int) -> int:
        self.abort_code = code
        return BLOCKED

    def _receive_message(
        self, slot: int, body: memoryview, flags: int, message: int, capacity: int, address: int
    ) -> int:
        request = self.transfers.receive_message(message, capacity, address)
        if request is None:
            return fail(body, ERR_REQUEST, f"receiving message {message}: there is none of this number")
        return self._started(body, flags, request)

    def _started(self, body: memoryview, flags: int, request: Any) -> int:
        """Reply to the start of an operation with its completion or its number; or wait for it."""
        if request.done:
            self.tell(body, request)
            return REPLIED
        if flags & CallFlag.BLOCKING:
            return int(request.number)
        REQUEST_REPLY.pack_into(body, 0, OK, request.number)
        return REPLIED

    def _probe(self, slot: int, body: memoryview, flags: int, comm: int, source: int, tag: int) -> int:
        # A matched one, whose message the engine has seen.
        message, number = self.transfers.take(comm, source, tag)
        PROBE_REPLY.pack_into(body, 0, OK, 1, message.source, message.tag, message.num_bytes, number)
        return REPLIED

    def _cancel(self, slot: int, body: memoryview, request: int) -> int:
        body[0], body[1] = OK, self.transfers.cancel(request)
        return REPLIED

    def _free(self, slot: int, body: memoryview, request: int) -> int:
        self.requests.detach(request)
        body[0] = OK
        return REPLIED

    def _fetch(self, slot: int, body: memoryview, parcel: int, address: int) -> int:
        self.memory.write(address, self.parcels[parcel])
        del self.parcels[parcel]
        body[0] = OK
        return REPLIED

    def _make_communicator(self, slot: int, body: memoryview, comm: int, count: int, world_ranks: int) -> int:
        self.collectives.add(comm, struct.unpack(f"<{count}i", self.memory.read(world_ranks, 4 * count)))
        # A program of sessions ends MPI with the last of them, and may begin again.
        self.finished = False
        body[0] = OK
        return REPLIED

    def _free_communicator(self, slot: int, body: memoryview, comm: int) -> int:
        self.collectives.remove(comm)
        body[0] = OK
        return REPLIED

    def _collective(self, slot: int, body: memoryview, *fields: int) -> int:
        flags, kind, op, datatype, comm, root, send_address, send_bytes, address, receive_bytes, num_counts = fields
        start = BY_NUMBER[body[0]].packer.size
        counts, start = self._counts(body, start, num_counts)
        if flags & CallFlag.INLINE:
            send: bytes | bytearray | memoryview = bytes(body[start : start + send_bytes])
            stays = False
        else:
            send, stays = self.memory.operand(send_address, send_bytes, range(address, address + receive_bytes))
        both = kind == Kind.ALLTOALLV
        half = num_counts // 2 if both else num_counts
        job = CollectiveCall(
            kind=_KINDS[kind],
            root=root,
            op=op,
            type=datatype,
            send=send,
            receive_bytes=receive_bytes,
            send_counts=counts[:half],
            receive_counts=counts[half:] if both else counts,
            send_address=send_address if stays else 0,
        )
        return self._started(body, flags, self.collectives.start(comm, job, address))

    def _counts(self, body: memoryview, start: int, num_counts: int) -> tuple[tuple[int, ...], int]:
        """Read the counts of a collective; also returns where its tail goes on."""
        form = struct.Struct(f"<{num_counts}q")
        if num_counts <= MAX_COUNTS:
            return form.unpack_from(body, start), start + form.size
        (address,) = struct.unpack_from("<Q", body, start)
        return form.unpack(self.memory.read(address, form.size)), start + 8

    def _make_window(self, slot: int, body: memoryview, window: int, base: int) -> int:
        self.windows.windows[window] = Exposure(base)
        body[0] = OK
        return REPLIED

    def _free_window(self, slot: int, body: memoryview, window: int) -> int:
        del self.windows.windows[window]
        body[0] = OK
        return REPLIED

    def _attach_memory(self, slot: int, body: memoryview, window: int, address: int, num_bytes: int) -> int:
        self.windows.windows[window].regions[address] = num_bytes
        body[0] = OK
        return REPLIED

    def _detach_memory(self, slot: int, body: memoryview, window: int, address: int) -> int:
        del self.windows.windows[window].regions[address]
        body[0] = OK
        return REPLIED

    def _access(self, slot: int, body: memoryview, *fields: int) -> int:
        flags, op, datatype, fetches, unit, window, target, data, data_bytes, result, num_runs = fields
        runs = unpack_runs(body[BY_NUMBER[body[0]].packer.size :], num_runs)
        operands = Operands(window, target, data, data_bytes, result)
        return self._started(body, flags, self.windows.access(operands, Verb(op, datatype, bool(fetches)), runs, unit))

    def start_access(self, slot: int, call: bytes) -> None:
        """Serve a ``start_access`` from a ring; it gets no reply."""
        row = BY_NAME["start_access"]
        _, request, *fields = row.packer.unpack_from(call)
        op, datatype, fetches, window, target, result, num_data, offset, num_bytes = fields
        data = call[row.packer.size : row.packer.size + num_data]
        operands = Operands(window, target, data, num_data, result)
        runs = [(offset, num_bytes)]
        self.windows.access(operands, Verb(op, datatype, bool(fetches)), runs, 1, number=request)

    # Replies.

    def tell(self, body: memoryview, request: Any) -> None:
        """Reply with the end of one operation."""
        REQUEST_REPLY.pack_into(body, 0, OK, 0)
        self._put_completion(body, REQUEST_REPLY.size, request)

    def tell_wait(self, body: memoryview) -> None:
        """Reply to the ``wait`` in a body with the completions of all requests, of any one, or of all that are over."""
        row = BY_NAME["wait"]
        _, _, mode, count = row.packer.unpack_from(body)
        numbers = struct.unpack_from(f"<{count}Q", body, row.packer.size)
        end = WAIT_REPLY.size
        told = 0
        for index, number in enumerate(numbers):
            request = self.requests.by_number.get(number)
            if request is not None and not request.done:
                continue
            INDEX.pack_into(body, end, index)
            end += INDEX.size
            # The part that follows must have room for its record at least.
            rest = (INDEX.size + COMPLETION.size) * (count - index - 1)
            if request is None:
                COMPLETION.pack_into(body, end, 0, 0, 0, ERR_REQUEST, PayloadPlace.NONE, 0)
                end += COMPLETION.size
            else:
                end = self._put_completion(body, end, request, rest)
            told += 1
            if mode == WaitFor.ANY:
                break
        WAIT_REPLY.pack_into(body, 0, OK, told)

    def _put_completion(self, body: memoryview, start: int, request: Any, rest: int = 0) -> int:
        """Write one completion and forget the request; returns where the next may begin."""
        payload, parcel, inline = self._place(request, BODY_BYTES - start - COMPLETION.size - rest)
        COMPLETION.pack_into(
            body, start, request.source, request.message_tag, request.message_bytes, request.error, payload, parcel
        )
        self.requests.forget(request)
        start += COMPLETION.size
        if inline:
            body[start : start + len(inline)] = inline
        return start + len(inline)

    def _place(self, request: Any, room: int) -> tuple[int, int, bytes | bytearray | memoryview]:
        """Choose how the payload reaches the upper half: by the reply, into its memory, or as a parcel."""
        if request.cancelled:
            return PayloadPlace.CANCELLED, 0, b""
        if request.written:
            return PayloadPlace.WRITTEN, 0, b""
        if request.payload is None or request.kind == SEND:
            return PayloadPlace.NONE, 0, b""
        data: bytes | bytearray | memoryview = request.payload
        if request.num_bytes != PARCEL and len(data) > request.num_bytes:
            data = memoryview(data)[: request.num_bytes]
        if len(data) <= min(room, EAGER_BYTES):
            return PayloadPlace.INLINE, 0, data
        if request.num_bytes != PARCEL:
            self.memory.write(request.address, data)
            return PayloadPlace.WRITTEN, 0, b""
        parcel, self.next_parcel = self.next_parcel, self.next_parcel + 1
        self.parcels[parcel] = request.payload
        return PayloadPlace.PARCEL, parcel, b""


def fail(body: memoryview, error_class: int, text: str) -> int:
    """Reply with an error; returns REPLIED, as every handler does whose reply is complete."""
    words = text.encode()[: BODY_BYTES - FAILURE.size]
    FAILURE.pack_into(body, 0, FAILED, error_class, len(words))
    body[FAILURE.size : FAILURE.size + len(words)] = words
    return REPLIED
