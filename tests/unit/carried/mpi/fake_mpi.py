"""What engines of tests need of an MPI that is not there: the types of its functions, and a setup with defaults."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from remesh.carried.mpi.calls.wire_messages import HEADER, HEADER_FIELDS
from remesh.carried.mpi.calls.words import CORE, DOORBELL, FIRST_SLOT, REPLY, STRIDE
from remesh.carried.mpi.channel import SharedChannel
from remesh.carried.mpi.lower.engine import Setup
from remesh.carried.mpi.lower.matching import Matching
from remesh.carried.mpi.lower.numbered import Numbered
from remesh.carried.mpi.lower.requests import Requests
from remesh.carried.mpi.native import NATIVE

FRAME_REQUEST = 99
"""Handle of the wire's posted receive."""
_FRAME_BYTES = 40_000
_libc = ctypes.CDLL(None)
IsendType = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_uint64),
)  # fmt: skip
AskType = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_int), ctypes.c_void_p)
StartType = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
_ReduceType = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t
)


class PostedFrame:
    """What the wire's posted receive receives into."""

    def __init__(self) -> None:
        self._bytes, self._handle = bytearray(_FRAME_BYTES), ctypes.c_uint64(FRAME_REQUEST)

    @property
    def places(self) -> dict[str, int]:
        """As fields of a setup."""
        return {"frame_request": ctypes.addressof(self._handle), "frame": NATIVE.address_of(self._bytes)}

    def put(self, message: bytes) -> None:
        """A wire message has come."""
        self._bytes[: len(message)] = message


def address_of(function: Any) -> int:
    """Where a function of C's stands."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class PromptMpi:
    """Its sends are over at once, and it folds as it is told to."""

    def __init__(self, reduce: Callable[[int, int, int, int, int], int]) -> None:
        self.sent, self.coming = deque[tuple[int, bytes]](), deque[bytes]()
        self.frame = PostedFrame()
        self._keep = IsendType(self._isend), AskType(self._test), StartType(lambda handle: 0), _ReduceType(reduce)

    @property
    def functions(self) -> tuple[int, ...]:
        """As a setup has them."""
        isend, test, start, reduce = map(address_of, self._keep)
        return (isend, test, start, *[0] * 4, reduce, 0, 0, 0)

    def _isend(self, start: int, num_bytes: int, byte: int, dest: int, tag: int, comm: int, handle: Any) -> int:
        self.sent.append((dest, sent_frame(start, num_bytes)))
        handle[0] = 0
        return 0

    def _test(self, handle: Any, flag: Any, status: int) -> int:
        flag[0] = 1
        if handle[0] == FRAME_REQUEST:
            flag[0] = bool(self.coming)
            if self.coming:
                self.frame.put(self.coming.popleft())
        return 0


def ring(channel: SharedChannel) -> None:
    """Let the lower half look at the slots, and know on which core the program runs (plus 1)."""
    core, bell = (channel._view[at : at + 4].cast("I") for at in (CORE, DOORBELL))
    core[0] = _libc.sched_getcpu() + 1
    bell[0] += 1


def call_lower(channel: SharedChannel, slot: int) -> None:
    """Post the request that stands in the slot's body and wait until its reply stands there."""
    start = FIRST_SLOT + slot * STRIDE
    request, reply = (channel._view[at : at + 4].cast("I") for at in (start, start + REPLY))
    request[0] += 1
    ring(channel)
    while reply[0] != request[0]:
        os.sched_yield()


def pack_frame(source: int, fields: tuple[int, ...], payload: bytes) -> bytes:
    """A wire message as it travels; ``fields`` as `Wire.send` takes them."""
    comm, tag, what, request, num_bytes, pid, address = fields
    return HEADER.pack(comm, tag, what, 0, source, pid, request, num_bytes, address) + payload


def sent_frame(start: int, num_bytes: int) -> bytes:
    """A wire message as an engine hands it to MPI, but for the core of its program, which the machine has chosen."""
    fields = list(HEADER.unpack_from(frame := ctypes.string_at(start, num_bytes)))
    fields[HEADER_FIELDS.index("core")] = 0
    return HEADER.pack(*fields) + frame[HEADER.size :]


def unpack_frame(frame: bytes) -> tuple[int, tuple[int, ...], bytes]:
    """The inverse: source, fields and payload, as they are heard in Python."""
    comm, tag, what, _, source, pid, request, num_bytes, address = HEADER.unpack_from(frame)
    return source, (comm, tag, what, request, num_bytes, pid, address), frame[HEADER.size :]


def make_setup(
    channel: SharedChannel,
    requests: Requests,
    matching: Matching,
    frame: PostedFrame,
    functions: tuple[int, ...],
    **fields: Any,
) -> Setup:
    """For an engine on these; ``fields`` are the others that matter to a test."""
    posted, arrived = matching.posted_by_comm, matching.arrived_by_comm
    defaults: dict[str, Any] = {
        "comm": 1, "byte": 2, "ops": (), "types": (), "extents": (), "pairs": (), "arena_start": 0, "arena_bytes": 0,
        "piece_bytes": 1 << 17,
        "serve": lambda slot: -1, "serve_posted": lambda *posted: None, "tell": lambda *told: None,
        "tell_wait": lambda slot: None, "owed": [], "on_message": None,
        "make_plan": lambda *asked: None,
        "any_source": -1,
        "upper_spin": 0, "lower_spin": 0, "always_spins": False, "eager_us": 10, "patient_us": 100, "shortest_us": 50,
        "longest_us": 500, "idle_us": 1000, "give_way_us": 0, "seat": (),
    }  # fmt: skip
    tables = ("entered", "reals", "plans", "windows", "accesses", "access_queues")
    defaults |= {name: Numbered() for name in tables}
    own = {"base": channel.base, "by_number": requests.by_number, "posted": posted, "arrived": arrived}
    return Setup(
        requests=requests,
        next_number=requests.next_number_address,
        functions=functions,
        **own,
        **frame.places,
        **defaults | fields,
    )
