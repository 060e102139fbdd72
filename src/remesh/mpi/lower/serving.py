"""One dispatcher for all calls: what each row of the table does, and how its reply is laid out.

A handler either writes its reply, or registers a wait: the slot then stays unanswered until its requests are complete.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from remesh.mpi.calls.error_classes import CLASSES
from remesh.mpi.calls.table import (
    BY_NUMBER,
    COMPLETION,
    EAGER_BYTES,
    FAILED,
    FAILURE,
    HELLO_REPLY,
    INDEX,
    OK,
    PARCEL,
    PROBE_REPLY,
    REQUEST_REPLY,
    WAIT_REPLY,
    Flag,
    Kind,
    Payload,
    WaitFor,
)
from remesh.mpi.channel import BODY_BYTES
from remesh.mpi.lower.accesses import Verb, unpack_runs
from remesh.mpi.lower.collectives import Collectives, Job
from remesh.mpi.lower.exposure import Window
from remesh.mpi.lower.requests import SEND, Request, Requests
from remesh.mpi.lower.transfers import Transfers
from remesh.mpi.lower.upper_memory import UpperMemory
from remesh.mpi.lower.windows import Place, Windows

ERR_OTHER: Final = CLASSES["ERR_OTHER"]
ERR_REQUEST: Final = CLASSES["ERR_REQUEST"]


_KINDS: Final = tuple(Kind)


@dataclass(slots=True)
class Wait:
    """A slot that is answered when its requests are complete."""

    requests: list[int]
    mode: int  # WaitFor
    single: bool  # the reply is that of one blocking operation, not that of ``wait``


@dataclass(frozen=True, slots=True)
class ProbeWait:
    """A slot that is answered when a message has come that fits."""

    comm: int
    source: int
    tag: int
    take: bool


class Serving:
    """Serves requests out of slot bodies."""

    def __init__(
        self,
        transfers: Transfers,
        collectives: Collectives,
        windows: Windows,
        memory: UpperMemory,
        requests: Requests,
    ) -> None:
        self.transfers, self.collectives, self.windows = transfers, collectives, windows
        self.memory, self.requests = memory, requests
        self.waits: dict[int, Wait | ProbeWait] = {}
        """Slots that wait, and for what."""
        self.parcels: dict[int, bytes | bytearray] = {}
        """Payloads of messages of unknown size, until they are fetched."""
        self.next_parcel = 1
        self.description: dict[str, Any] = {}
        self.finished = False
        self.abort_code: int | None = None
        self.may_enter: Callable[[int], bool] = lambda comm: True
        self._handlers: dict[int, Callable[..., bool]] = {
            number: getattr(self, f"_{call.name}") for number, call in BY_NUMBER.items()
        }

    def serve(self, slot: int, body: memoryview) -> bool:
        """Serve the request in a slot's body; whether the reply stands there now."""
        call = BY_NUMBER.get(body[0])
        if call is None:
            return fail(body, ERR_OTHER, f"serving slot {slot}: there is no call number {body[0]}")
        try:
            return self._handlers[call.number](slot, body, *call.packer.unpack_from(body)[1:])
        except self.collectives.mpi_error as error:
            return fail(body, ERR_OTHER, f"{call.name} on the real MPI: {error}")
        except (KeyError, ValueError, OSError, struct.error) as error:
            return fail(body, ERR_OTHER, f"serving {call.name}: {type(error).__name__}: {error}")

    # Rows of the table.

    def _hello(self, slot: int, body: memoryview) -> bool:
        HELLO_REPLY.pack_into(body, 0, OK, self.transfers.wire.rank, self.transfers.wire.size)
        return True

    def _describe(self, slot: int, body: memoryview) -> bool:
        text = json.dumps(self.description).encode()
        INDEX.pack_into(body, 1, len(text))
        body[0] = OK
        body[1 + INDEX.size : 1 + INDEX.size + len(text)] = text
        return True

    def _finish(self, slot: int, body: memoryview) -> bool:
        self.finished = True
        body[0] = OK
        return True

    def _abort(self, slot: int, body: memoryview, code: int) -> bool:
        self.abort_code = code
        return False

    def _send(  # noqa: PLR0913 - the fields of the call
        self, slot: int, body: memoryview, flags: int, comm: int, dest: int, tag: int, num_bytes: int, address: int
    ) -> bool:
        if flags & Flag.INLINE:
            start = BY_NUMBER[body[0]].packer.size
            self.transfers.send_eager(comm, dest, tag, bytes(body[start : start + num_bytes]))
            REQUEST_REPLY.pack_into(body, 0, OK, 0)
            return True
        if num_bytes <= EAGER_BYTES and not flags & Flag.SYNCHRONOUS:
            self.transfers.send_eager(comm, dest, tag, bytes(self.memory.read(address, num_bytes)))
            REQUEST_REPLY.pack_into(body, 0, OK, 0)
            return True
        blocking = bool(flags & Flag.BLOCKING)
        request = self.transfers.send_announced(comm, dest, tag, address, num_bytes, blocking=blocking)
        return self._started(slot, body, flags, request)

    def _receive(  # noqa: PLR0913 - the fields of the call
        self, slot: int, body: memoryview, flags: int, comm: int, source: int, tag: int, capacity: int, address: int
    ) -> bool:
        return self._started(slot, body, flags, self.transfers.receive(comm, source, tag, capacity, address))

    def _receive_message(
        self, slot: int, body: memoryview, flags: int, message: int, capacity: int, address: int
    ) -> bool:
        request = self.transfers.receive_message(message, capacity, address)
        if request is None:
            return fail(body, ERR_REQUEST, f"receiving message {message}: there is none of this number")
        return self._started(slot, body, flags, request)

    def _start_receive(  # noqa: PLR0913 - the fields of the call
        self, slot: int, body: memoryview, request: int, comm: int, source: int, tag: int, capacity: int, address: int
    ) -> bool:
        self.transfers.receive(comm, source, tag, capacity, address, number=request)
        return True

    def serve_posted(self, slot: int, call: bytes) -> None:
        """Serve a call that nobody answers."""
        row = BY_NUMBER[call[0]]
        self._handlers[row.number](slot, memoryview(bytearray(call)), *row.packer.unpack_from(call)[1:])

    def _started(self, slot: int, body: memoryview, flags: int, request: Request) -> bool:
        """Reply to the start of an operation: complete, or its number; or wait for it."""
        if request.done:
            self.tell(body, request)
            return True
        if flags & Flag.BLOCKING:
            self.waits[slot] = Wait([request.number], WaitFor.ALL, single=True)
            return False
        REQUEST_REPLY.pack_into(body, 0, OK, request.number)
        return True

    def _probe(self, slot: int, body: memoryview, flags: int, comm: int, source: int, tag: int) -> bool:
        wanted = ProbeWait(comm, source, tag, take=bool(flags & Flag.MATCHED))
        if self._try_probe(body, wanted):
            return True
        if flags & Flag.BLOCKING:
            self.waits[slot] = wanted
            return False
        PROBE_REPLY.pack_into(body, 0, OK, 0, 0, 0, 0, 0)
        return True

    def _try_probe(self, body: memoryview, wanted: ProbeWait) -> bool:
        message, number = self.transfers.probe(wanted.comm, wanted.source, wanted.tag, take=wanted.take)
        if message is None:
            return False
        PROBE_REPLY.pack_into(body, 0, OK, 1, message.source, message.tag, message.num_bytes, number)
        return True

    def _wait(self, slot: int, body: memoryview, flags: int, mode: int, count: int) -> bool:
        wait = self._wait_in(body, mode, count)
        if self._is_over(wait):
            self._tell_wait(body, wait)
            return True
        if flags & Flag.BLOCKING:
            self.waits[slot] = wait
            return False
        WAIT_REPLY.pack_into(body, 0, OK, 0)
        return True

    def _wait_in(self, body: memoryview, mode: int, count: int) -> Wait:
        return Wait(list(struct.unpack_from(f"<{count}Q", body, BY_NUMBER[body[0]].packer.size)), mode, single=False)

    def tell_wait(self, body: memoryview) -> None:
        """Reply to the ``wait`` that stands in a body, which is over."""
        _, _, mode, count = BY_NUMBER[body[0]].packer.unpack_from(body)
        self._tell_wait(body, self._wait_in(body, mode, count))

    def _cancel(self, slot: int, body: memoryview, request: int) -> bool:
        body[0], body[1] = OK, self.transfers.cancel(request)
        return True

    def _free(self, slot: int, body: memoryview, request: int) -> bool:
        self.requests.detach(request)
        body[0] = OK
        return True

    def _fetch(self, slot: int, body: memoryview, parcel: int, address: int) -> bool:
        self.memory.write(address, self.parcels[parcel])
        del self.parcels[parcel]
        body[0] = OK
        return True

    def _make_communicator(self, slot: int, body: memoryview, comm: int, count: int) -> bool:
        self.collectives.add(comm, struct.unpack_from(f"<{count}i", body, BY_NUMBER[body[0]].packer.size))
        body[0] = OK
        return True

    def _free_communicator(self, slot: int, body: memoryview, comm: int) -> bool:
        self.collectives.remove(comm)
        body[0] = OK
        return True

    def _collective(self, slot: int, body: memoryview, *fields: int) -> bool:
        flags, kind, op, datatype, comm, root, send_address, send_bytes, address, receive_bytes, num_counts = fields
        if not self.may_enter(comm):
            return False
        start = BY_NUMBER[body[0]].packer.size
        counts = struct.unpack_from(f"<{num_counts}q", body, start)
        start += 8 * num_counts
        if flags & Flag.INLINE:
            send: bytes | bytearray | memoryview = bytes(body[start : start + send_bytes])
        else:
            send = self._operand(send_address, send_bytes, range(address, address + receive_bytes))
        both = kind == Kind.ALLTOALLV
        half = num_counts // 2 if both else num_counts
        job = Job(
            kind=_KINDS[kind],
            root=root,
            op=op,
            type=datatype,
            send=send,
            receive_bytes=receive_bytes,
            send_counts=counts[:half],
            receive_counts=counts[half:] if both else counts,
        )
        return self._started(slot, body, flags, self.collectives.start(comm, job, address))

    def _operand(self, address: int, num_bytes: int, result: range) -> bytearray | memoryview:
        """What a collective sends, while its result is written to these addresses: in place where that can be."""
        if num_bytes <= EAGER_BYTES:
            return self.memory.read(address, num_bytes) if num_bytes else bytearray()
        place = self.memory.view(address, num_bytes)
        # MPI wants both apart, and the program may have asked for both in one place.
        is_apart = address + num_bytes <= result.start or result.stop <= address
        if place is not None and is_apart:
            return place
        copy = self.memory.large.lend(num_bytes)
        if place is None:
            self.memory.read_into(address, copy)
        else:
            copy[:] = place
        return copy

    def _make_window(self, slot: int, body: memoryview, window: int, base: int) -> bool:
        self.windows.windows[window] = Window(base)
        body[0] = OK
        return True

    def _free_window(self, slot: int, body: memoryview, window: int) -> bool:
        del self.windows.windows[window]
        body[0] = OK
        return True

    def _attach_memory(self, slot: int, body: memoryview, window: int, address: int, num_bytes: int) -> bool:
        self.windows.windows[window].regions[address] = num_bytes
        body[0] = OK
        return True

    def _detach_memory(self, slot: int, body: memoryview, window: int, address: int) -> bool:
        del self.windows.windows[window].regions[address]
        body[0] = OK
        return True

    def _access(self, slot: int, body: memoryview, *fields: int) -> bool:
        flags, op, datatype, fetches, unit, window, target, data, data_bytes, result, num_runs = fields
        runs = unpack_runs(body[BY_NUMBER[body[0]].packer.size :], num_runs)
        place = Place(window, target, data, data_bytes, result)
        return self._started(
            slot, body, flags, self.windows.access(place, Verb(op, datatype, bool(fetches)), runs, unit)
        )

    def _start_access(self, slot: int, body: memoryview, request: int, *fields: int) -> bool:
        op, datatype, fetches, window, target, result, num_data, offset, num_bytes = fields
        start = BY_NUMBER[body[0]].packer.size
        place = Place(window, target, bytes(body[start : start + num_data]), num_data, result)
        runs = [(offset, num_bytes)]
        self.windows.access(place, Verb(op, datatype, bool(fetches)), runs, 1, number=request)
        return True

    def _lock(self, slot: int, body: memoryview, flags: int, window: int, target: int, exclusive: int) -> bool:
        return self._started(slot, body, flags, self.windows.lock(window, target, exclusive=bool(exclusive)))

    def _unlock(self, slot: int, body: memoryview, window: int, target: int) -> bool:
        self.windows.unlock(window, target)
        body[0] = OK
        return True

    # Replies.

    def flush(self, bodies: tuple[memoryview, ...]) -> list[int]:
        """Write the replies of all waits that are over; their slots."""
        answered = []
        for slot, wait in list(self.waits.items()):
            body = bodies[slot]
            if isinstance(wait, ProbeWait):
                if not self._try_probe(body, wait):
                    continue
            elif not self._is_over(wait):
                continue
            elif wait.single:
                self.tell(body, self.requests.by_number[wait.requests[0]])
            else:
                self._tell_wait(body, wait)
            del self.waits[slot]
            answered.append(slot)
        return answered

    def _is_over(self, wait: Wait) -> bool:
        known = self.requests.by_number
        done = (number not in known or known[number].done for number in wait.requests)
        return all(done) if wait.mode == WaitFor.ALL else any(done)

    def tell(self, body: memoryview, request: Request) -> None:
        """Reply with the end of one operation."""
        REQUEST_REPLY.pack_into(body, 0, OK, 0)
        self._put_completion(body, REQUEST_REPLY.size, request)

    def _tell_wait(self, body: memoryview, wait: Wait) -> None:
        """Reply with what is complete: all, any one, or all that are."""
        end = WAIT_REPLY.size
        told = 0
        for index, number in enumerate(wait.requests):
            request = self.requests.by_number.get(number)
            if request is not None and not request.done:
                continue
            INDEX.pack_into(body, end, index)
            end += INDEX.size
            # What follows must have room for its record at least.
            rest = (INDEX.size + COMPLETION.size) * (len(wait.requests) - index - 1)
            if request is None:
                COMPLETION.pack_into(body, end, 0, 0, 0, ERR_REQUEST, Payload.NONE, 0)
                end += COMPLETION.size
            else:
                end = self._put_completion(body, end, request, rest)
            told += 1
            if wait.mode == WaitFor.ANY:
                break
        WAIT_REPLY.pack_into(body, 0, OK, told)

    def _put_completion(self, body: memoryview, start: int, request: Request, rest: int = 0) -> int:
        """Write one completion and forget the request; where the next may begin."""
        payload, parcel, inline = self._place(request, BODY_BYTES - start - COMPLETION.size - rest)
        COMPLETION.pack_into(
            body, start, request.source, request.message_tag, request.message_bytes, request.error, payload, parcel
        )
        self.requests.forget(request)
        start += COMPLETION.size
        if inline:
            body[start : start + len(inline)] = inline
        return start + len(inline)

    def _place(self, request: Request, room: int) -> tuple[int, int, bytes | bytearray | memoryview]:
        """How the payload reaches the upper half: by the reply, into its memory, or as a parcel."""
        if request.cancelled:
            return Payload.CANCELLED, 0, b""
        if request.written:
            return Payload.WRITTEN, 0, b""
        if request.payload is None or request.kind == SEND:
            return Payload.NONE, 0, b""
        data: bytes | bytearray | memoryview = request.payload
        if request.num_bytes != PARCEL and len(data) > request.num_bytes:
            data = memoryview(data)[: request.num_bytes]
        if len(data) <= min(room, EAGER_BYTES):
            return Payload.INLINE, 0, data
        if request.num_bytes != PARCEL:
            self.memory.write(request.address, data)
            return Payload.WRITTEN, 0, b""
        parcel, self.next_parcel = self.next_parcel, self.next_parcel + 1
        self.parcels[parcel] = request.payload
        return Payload.PARCEL, parcel, b""


def fail(body: memoryview, error_class: int, text: str) -> bool:
    """Reply with an error; True, as any handler whose reply is complete."""
    words = text.encode()[: BODY_BYTES - FAILURE.size]
    FAILURE.pack_into(body, 0, FAILED, error_class, len(words))
    body[FAILURE.size : FAILURE.size + len(words)] = words
    return True
