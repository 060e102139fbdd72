"""The upper half's end of the channel: asks a call, waits for the reply, and lands the payload that comes with it.

Each thread of the program has a slot of its own as long as it lives. A call that an exception left (a signal handler
raised) stays in its slot until it is answered; the thread goes on with another slot. Until then the lower half may read
or write the memory that the call speaks of, so that is kept.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

from remesh.mpi.arena import share_arrays
from remesh.mpi.calls.table import (
    BY_NAME,
    COMPLETION,
    EAGER_BYTES,
    FAILURE,
    FIRST_POSTED,
    HELLO_REPLY,
    INDEX,
    MAX_COUNTS,
    PROBE_REPLY,
    REQUEST_REPLY,
    WAIT_REPLY,
    CallFlag,
    CallRow,
    PayloadPlace,
)
from remesh.mpi.calls.words import NUM_SLOTS
from remesh.mpi.channel import SharedChannel
from remesh.mpi.native import NATIVE
from remesh.mpi.upper.exceptions import failure, numbered_failure
from remesh.mpi.upper.views import byte_view

CHANNEL_VARIABLE: Final = "REMESH_CHANNEL"
_DEFAULT_CHANNEL: Final = "/tmp/.remesh/channel"
_SEND, _RECEIVE, _PROBE = BY_NAME["send"], BY_NAME["receive"], BY_NAME["probe"]
_RECEIVE_MESSAGE, _WAIT, _COLLECTIVE = BY_NAME["receive_message"], BY_NAME["wait"], BY_NAME["collective"]
_SHORT_WAIT_BYTES: Final = 32768
_LOOK_S: Final = 0.01
"""Between looks for a slot to take back, where there is no other."""
_ENDED_BYTES: Final = COMPLETION.size + INDEX.size
MAX_WAIT: Final = 1000
"""Requests in one ``wait``: their completions fit into a slot."""


class Landing(Protocol):
    """Where the payload of a receive or collective goes."""

    address: int  # 0: nowhere by address
    capacity: int  # PARCEL: whatever comes

    def put(self, data: memoryview) -> None:
        """The payload came with the reply."""

    def finish(self, num_bytes: int) -> None:
        """All bytes (at most the capacity) are at their place."""


class Completion:
    """How an operation ended."""

    __slots__ = ("cancelled", "error", "num_bytes", "source", "tag")

    def __init__(self, source: int, tag: int, num_bytes: int, error: int, cancelled: bool = False) -> None:
        self.source, self.tag, self.num_bytes, self.error, self.cancelled = source, tag, num_bytes, error, cancelled


_mine = threading.local()
"""``port`` and ``slot`` of this thread; a process has one link."""


class _Lease:
    """A thread's slot; goes back when the thread ends."""

    def __init__(self, link: Link, slot: int) -> None:
        self._link, self.slot = link, slot
        self.lost = False

    def __del__(self) -> None:
        if not self.lost:
            self._link.give_back(self.slot)


class Link:
    """Calls over one channel, from any thread."""

    def __init__(self, channel: SharedChannel) -> None:
        self._channel = channel
        self._numbers = itertools.count(FIRST_POSTED)
        self._free = list(range(NUM_SLOTS - 1, -1, -1))
        self._left: dict[int, Any] = {}
        """Slots with a call that an exception left, and what owns the memory that it speaks of."""
        self._one_free = threading.Condition(threading.Lock())
        self.gate = channel.gate(self._wait_until_open)
        """As a context: this thread uses a file that other ranks have open.

        No rank's image is taken in it, so all images of a checkpoint see a file in one state. No MPI call may be made
        in it: that could wait for the end of a checkpoint, which would wait for this.
        """

    def _take_slot(self) -> None:
        with self._one_free:
            self._take_back_answered()
            # Nobody tells of a reply that nobody waits for: it is looked for.
            while not self._one_free.wait_for(lambda: self._free, _LOOK_S):
                self._take_back_answered()
            slot = self._free.pop()
        _mine.lease = _Lease(self, slot)
        _mine.slot = (slot, self._channel.bodies[slot])
        _mine.port = self._channel.port(slot)

    def _take_back_answered(self) -> None:
        pending = self._channel.pending()
        for slot in [slot for slot in self._left if not pending >> slot & 1]:
            del self._left[slot]
            self._free.append(slot)

    def leave_slot(self, keep: Any) -> None:
        """An exception has left a call that may be unanswered: this thread goes on with another slot.

        ``keep`` owns the memory that the call speaks of.
        """
        with self._one_free:
            self._left[_mine.lease.slot] = keep
        _mine.lease.lost = True
        del _mine.lease, _mine.slot, _mine.port

    def give_back(self, slot: int) -> None:
        """A thread has ended; another may take its slot."""
        with self._one_free:
            self._free.append(slot)
            self._one_free.notify()

    def ask(self, call: CallRow, fields: tuple[int, ...], tail: Any = None, *, keep: Any = None) -> memoryview:
        """One call; the slot's body with the reply, valid until this thread's next call.

        ``keep`` owns the memory that is read or written by address before the reply.
        """
        try:
            slot, body = _mine.slot
        except AttributeError:
            self._take_slot()
            slot, body = _mine.slot
        call.packer.pack_into(body, 0, call.number, *fields)
        if tail is not None:
            start = call.packer.size
            body[start : start + len(tail)] = tail
        try:
            self._channel.call(slot)
        except BaseException:
            self.leave_slot(keep)
            raise
        if body[0]:
            raise _failure_in(body)
        return cast(memoryview, body)

    def hello(self) -> tuple[int, int]:
        """This rank and the number of ranks."""
        _, rank, size = HELLO_REPLY.unpack_from(self.ask(BY_NAME["hello"], ()))
        return rank, size

    def _wait_until_open(self) -> None:
        """A call that is answered only while the lower half is open, and changes nothing."""
        self.ask(BY_NAME["hello"], ())

    def describe(self) -> bytes:
        """What the lower half says about its MPI library: JSON."""
        body = self.ask(BY_NAME["describe"], ())
        start = 1 + INDEX.size
        return bytes(body[start : start + INDEX.unpack_from(body, 1)[0]])

    def send(self, flags: int, comm: int, dest: int, tag: int, view: memoryview) -> int:
        """Send contiguous bytes; the request that completes it, 0 if that has happened."""
        num_bytes = len(view)
        if not flags & CallFlag.SYNCHRONOUS and port().post(comm, dest, tag, view):
            return 0
        if num_bytes <= EAGER_BYTES and not flags & CallFlag.SYNCHRONOUS:
            body = self.ask(_SEND, (flags | CallFlag.INLINE, comm, dest, tag, num_bytes, 0), view)
        else:
            address = NATIVE.address_of(view) if num_bytes else 0
            body = self.ask(_SEND, (flags, comm, dest, tag, num_bytes, address), keep=view)
        return int(REQUEST_REPLY.unpack_from(body)[1])

    def receive(self, flags: int, comm: int, source: int, tag: int, landing: Landing) -> int | Completion:
        """Start a receive: how it ended, or the request that completes it."""
        capacity, address = landing.capacity, landing.address
        if not flags & CallFlag.BLOCKING:
            number = next(self._numbers)
            if port().start_receive(number, comm, source, tag, capacity, address):
                return number
        fields = (flags, comm, source, tag, capacity, address)
        return self._ended(self.ask(_RECEIVE, fields, keep=landing), landing)

    def receive_message(self, flags: int, message: int, landing: Landing) -> int | Completion:
        """The same for a message that a matched probe has taken."""
        fields = (flags, message, landing.capacity, landing.address)
        return self._ended(self.ask(_RECEIVE_MESSAGE, fields, keep=landing), landing)

    def collective(
        self, fields: tuple[int, ...], counts: tuple[int, ...], send: memoryview | None, landing: Landing
    ) -> int | Completion:
        """Start a collective. ``fields``: flags, kind, op, type, communicator, root."""
        packed = tail = struct.pack(f"<{len(counts)}q", *counts) if counts else b""
        if len(counts) > MAX_COUNTS:
            tail = struct.pack("<Q", NATIVE.address_of(packed))
        flags, *rest = fields
        num_bytes = 0 if send is None else len(send)
        address = 0
        if send is not None and num_bytes:
            if num_bytes <= EAGER_BYTES and len(tail) <= EAGER_BYTES // 2:
                flags |= CallFlag.INLINE
                tail += send
            else:
                address = NATIVE.address_of(send)
        wanted = (flags, *rest, address, num_bytes, landing.address, landing.capacity, len(counts))
        return self._ended(self.ask(_COLLECTIVE, wanted, tail, keep=(send, landing, packed)), landing)

    def started(self, call: CallRow, fields: tuple[int, ...], tail: Any = None) -> int | Completion:
        """Start an operation whose data land by address: how it ended, or the request that completes it."""
        return self._ended(self.ask(call, fields, tail), None)

    def probe(self, flags: int, comm: int, source: int, tag: int) -> tuple[Completion, int] | None:
        """The message a receive would get, and its number if it was taken; None if there is none."""
        body = self.ask(_PROBE, (flags, comm, source, tag))
        _, found, message_source, message_tag, num_bytes, message = PROBE_REPLY.unpack_from(body)
        return (Completion(message_source, message_tag, num_bytes, 0), message) if found else None

    def wait(self, flags: int, mode: int, waiting: list[tuple[int, Landing | None]]) -> list[tuple[int, Completion]]:
        """Wait for requests, with the landing of each: (index, how it ended) of those that are complete."""
        tail = struct.pack(f"<{len(waiting)}Q", *(number for number, _ in waiting))
        body = self.ask(_WAIT, (flags, mode, len(waiting)), tail)
        ended = []
        position = WAIT_REPLY.size
        parcels = []
        for _ in range(WAIT_REPLY.unpack_from(body)[1]):
            (index,) = INDEX.unpack_from(body, position)
            landing = waiting[index][1]
            completion, position, parcel = self._read(body, position + INDEX.size, landing)
            ended.append((index, completion))
            parcels.append((landing, completion, parcel))
        # Fetching asks again, in the same slot: only when all has been read.
        for landing, completion, parcel in parcels:
            self._land(landing, completion, parcel)
        return ended

    def fetch(self, parcel: int, into: bytearray) -> None:
        """Have the bytes of a parcel written here."""
        self.ask(BY_NAME["fetch"], (parcel, NATIVE.address_of(into)), keep=into)

    def _ended(self, body: memoryview, landing: Landing | None) -> int | Completion:
        _, number = REQUEST_REPLY.unpack_from(body)
        if number:
            return int(number)
        completion, _, parcel = self._read(body, REQUEST_REPLY.size, landing)
        self._land(landing, completion, parcel)
        return completion

    def _read(self, body: memoryview, position: int, landing: Landing | None) -> tuple[Completion, int, int]:
        source, tag, num_bytes, error, where, parcel = COMPLETION.unpack_from(body, position)
        position += COMPLETION.size
        completion = Completion(source, tag, num_bytes, error, where == PayloadPlace.CANCELLED)
        if where == PayloadPlace.INLINE and landing is not None:
            length = num_bytes if landing.capacity < 0 else min(num_bytes, landing.capacity)
            landing.put(body[position : position + length])
            position += length
        return completion, position, parcel if where == PayloadPlace.PARCEL else 0

    def _land(self, landing: Landing | None, completion: Completion, parcel: int) -> None:
        if landing is None or completion.cancelled:
            return
        if parcel:
            whole = bytearray(completion.num_bytes)
            self.fetch(parcel, whole)
            landing.put(memoryview(whole))
        room = completion.num_bytes if landing.capacity < 0 else min(completion.num_bytes, landing.capacity)
        landing.finish(room)


def _failure_in(body: memoryview) -> BaseException:
    _, error_class, length = FAILURE.unpack_from(body)
    return numbered_failure(error_class, bytes(body[FAILURE.size : FAILURE.size + length]).decode())


def port() -> Any:
    """This thread's short way."""
    try:
        return _mine.port
    except AttributeError:
        link()._take_slot()
        return _mine.port


def call_shortly(way: Callable[..., Any], *fields: Any) -> Any:
    """The result of a blocking receive, exchange or wait by the short way; None where the call cannot take it.

    ``way`` is the method of this thread's port, which says by an integer that it failed; ``fields`` are its arguments.
    """
    try:
        ended = way(*fields)
    except BaseException:
        link().leave_slot(fields)
        raise
    if isinstance(ended, int):
        raise _failure_in(_mine.slot[1])
    return ended


class _Plain:
    """A payload lands in place, in a buffer that the short way has taken."""

    __slots__ = ("address", "capacity", "view")

    def __init__(self, view: memoryview) -> None:
        self.view, self.capacity = view, view.nbytes
        self.address = 0

    def put(self, data: memoryview) -> None:
        byte_view(self.view)[0][: len(data)] = data

    def finish(self, num_bytes: int) -> None:
        pass


def start_shortly(comm: int, peers: tuple[int, ...], buffer: Any, source: int, tag: int) -> tuple[int, Landing] | None:
    """Start a receive by the short way: its request, and its buffer; None where the call cannot take that way."""
    number = next(link()._numbers)
    view = port().start(number, comm, peers, buffer, source, tag)
    return None if view is None else (number, _Plain(view))


def access_shortly(
    op: tuple[int, bytes], place: tuple[int, int, int], displacement: Any, is_one: bool, buffers: tuple[Any, Any, Any]
) -> tuple[int, Landing | None, int] | None:
    """Start an access to a window by the short way: its request, where its result lands, and its bytes; None as above.

    ``place``: window, world rank, bytes of a displacement; ``buffers``: origin, what is compared, result, or None.
    """
    number = next(link()._numbers)
    try:
        kept = port().access(number, op, place, displacement, is_one, *buffers)
    except BaseException:
        link().leave_slot(None)
        raise
    if kept is None:
        return None
    return (number, None, kept) if isinstance(kept, int) else (number, _Plain(kept), kept.nbytes)


def post_access(
    verb: tuple[int, int, bool], place: tuple[int, int], run: tuple[int, int], data: memoryview, result: int
) -> int:
    """Post an access of one run of bytes: its request, or 0 where that does not go."""
    number = next(link()._numbers)
    try:
        is_posted = port().post_access(number, verb, place, run, data, result)
    except BaseException:
        link().leave_slot(None)
        raise
    return number if is_posted else 0


class Awaited(Protocol):
    """An operation of the lower half that is waited for."""

    number: int
    landing: Landing | None
    completion: Completion | None


def wait_shortly(operations: Sequence[Awaited]) -> bool:
    """Wait for all by the short way, and note how they ended; False where that does not go.

    It does if all payloads land in place and find room in one reply.
    """
    room, numbers, views = _SHORT_WAIT_BYTES, [], []
    for one in operations:
        view: memoryview | None = None
        if one.landing is not None:
            view = getattr(one.landing, "view", None)
            if view is None:
                return False
            room -= one.landing.capacity
        room -= _ENDED_BYTES
        numbers.append(one.number)
        views.append(view)
    if room < 0:
        return False
    ended = call_shortly(port().wait, numbers, views)
    if ended is None:
        return False
    for one, how in zip(operations, ended, strict=True):
        one.completion = Completion(*how)
    return True


def collect_shortly(kind: int, op: tuple[int, bytes], comm: int, root: int, send: Any, receive: Any) -> bool:
    """A blocking collective by the short way; False where that does not go."""
    try:
        ended = port().collective(kind, op, comm, root, send, receive)
    except BaseException:
        link().leave_slot((send, receive))
        raise
    if ended > 1:
        raise _failure_in(_mine.slot[1])
    return bool(ended)


def start_collecting(
    kind: int, op: tuple[int, bytes], comm: int, root: int, send: Any, receive: Any
) -> tuple[int, Landing | None] | None:
    """Start a collective by the short way: its request (0: it is over), and where it lands; None as above."""
    try:
        number = port().start_collective(kind, op, comm, root, send, receive)
    except BaseException:
        link().leave_slot((send, receive))
        raise
    if number is None:
        return None
    if number < 0:
        raise _failure_in(_mine.slot[1])
    return number, None if receive is None else _Plain(memoryview(receive))


_link: Link | None = None


def link() -> Link:
    """The link of this process; made at first use.

    Raises:
        Exception: there is no lower half: the program was not started by ``remesh mpi run``.
    """
    global _link
    if _link is None:
        path = os.environ.get(CHANNEL_VARIABLE, _DEFAULT_CHANNEL)
        try:
            _link = Link(SharedChannel.map(path))
            share_arrays(path)
        except (OSError, ValueError) as error:
            raise failure("ERR_OTHER", str(error)) from error
    return _link
