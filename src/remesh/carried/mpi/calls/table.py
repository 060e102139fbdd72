"""Table of the calls that cross the channel: layout in a slot, and replay after a checkpoint.

The upper half keeps everything that needs no other rank (groups, datatypes, attributes, topologies, statuses,
persistent requests, user operations) and turns the rest of MPI into the few calls below. All handles are virtual:
communicators and requests are integers, ranks are ranks of the world, data are plain bytes.

A request is ``B`` (number of the call) and the call's fixed part, little-endian and unaligned, then its tail. A reply
is ``B`` (:data:`OK` or :data:`FAILED`) and the reply's fixed part, then its tail. A failed reply carries
:data:`FAILURE` and a UTF-8 text.

Some calls may also be posted in a slot's ring, which has no replies: an inline ``send``, an ``unlock``, and
``start_receive`` and ``start_access``, whose requests have numbers that the upper half has chosen.

What happens to an unanswered request at a checkpoint is its :class:`Replay` rule. What is done before the reply is
either nothing, or an entry in the saved state under the slot and the request's number.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from typing import Final

FIRST_POSTED: Final = 1 << 62
"""The upper half numbers the requests that it posts without waiting for a reply, from here on."""

OK: Final = 0
FAILED: Final = 1
FAILURE: Final = struct.Struct("<Bii")
"""Status, MPI error class, bytes of text that follow."""

EAGER_BYTES: Final = 32768
"""Payloads of at most so many bytes travel in the slot and with the header; longer ones are fetched when matched."""

ANY: Final = -1
"""Any source, any tag."""
PARCEL: Final = -1
"""A capacity that takes a message of whatever size; as many bytes as it has are fetched later."""


class Effect(enum.Enum):
    """The objects that a call touches; the collective clock and the counts look at this."""

    LOCAL = "local"  # this rank's tables only
    SEND = "send"
    RECEIVE = "receive"
    COLLECTIVE = "collective"  # counted by the clock
    WINDOW = "window"  # another rank's memory, or a lock on it
    NOTICE = "notice"  # one message to another rank, over at once


class Replay(enum.Enum):
    """The way in which the next lower half repeats a request that had no answer."""

    AGAIN = "again"  # serve it as if it came now
    ATTACH = "attach"  # its operation stands in the saved state: wait for that, and reply
    POSTED = "posted"  # its caller waits for no answer: until taken it stands in a ring, and is taken from there


@dataclass(frozen=True, slots=True)
class CallRow:
    """One row of the table."""

    number: int  # first byte of the request; unique
    name: str
    request: str  # struct format of the fixed part behind the first byte
    fields: tuple[str, ...]  # its names, in order
    effect: Effect
    replay: Replay
    packer: struct.Struct = field(init=False, repr=False, compare=False)  # of the whole fixed part

    def __post_init__(self) -> None:
        packer = struct.Struct("<B" + self.request)
        if len(packer.unpack(bytes(packer.size))) != len(self.fields) + 1:
            raise ValueError(f"call {self.name}: {self.request!r} does not have {len(self.fields)} fields")
        object.__setattr__(self, "packer", packer)


class CallFlag:
    """Bits of the field ``flags``."""

    BLOCKING: Final = 1
    INLINE: Final = 2  # the payload is the tail of the request
    SYNCHRONOUS: Final = 4  # complete when matched, not before
    MATCHED: Final = 8  # a probe that takes the message out of the queue


class WaitFor:
    """Field ``mode`` of ``wait``."""

    ANY: Final = 0
    ALL: Final = 1
    SOME: Final = 2


class Kind(enum.IntEnum):
    """Field ``kind`` of ``collective``. All data are contiguous in order of ranks, without gaps."""

    BARRIER = 0
    BCAST = 1
    GATHER = 2
    GATHERV = 3
    SCATTER = 4
    SCATTERV = 5
    ALLGATHER = 6
    ALLGATHERV = 7
    ALLTOALL = 8
    ALLTOALLV = 9
    REDUCE = 10
    ALLREDUCE = 11
    REDUCE_SCATTER = 12
    SCAN = 13
    EXSCAN = 14


REDUCTIONS: Final = frozenset({Kind.REDUCE, Kind.ALLREDUCE, Kind.REDUCE_SCATTER, Kind.SCAN, Kind.EXSCAN})

REAL_OPS: Final = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MINLOC", "MAXLOC")
"""Field ``op``: index of the operation that the real MPI is to apply."""
REAL_TYPES: Final = (
    *("BYTE", "SIGNED_CHAR", "UNSIGNED_CHAR", "SHORT", "UNSIGNED_SHORT", "INT", "UNSIGNED", "LONG", "UNSIGNED_LONG"),
    *("LONG_LONG", "UNSIGNED_LONG_LONG", "FLOAT", "DOUBLE", "LONG_DOUBLE", "C_BOOL", "C_FLOAT_COMPLEX"),
    *("C_DOUBLE_COMPLEX", "INT8_T", "INT16_T", "INT32_T", "INT64_T", "UINT8_T", "UINT16_T", "UINT32_T", "UINT64_T"),
    *("SHORT_INT", "INT_INT", "LONG_INT", "FLOAT_INT", "DOUBLE_INT", "LONG_DOUBLE_INT"),
)
"""Field ``type``: index of the basic datatype of a reduction; all other data travel as bytes."""

PAIR_FORMATS: Final = {
    "SHORT_INT": "=hi",
    "INT_INT": "=ii",
    "LONG_INT": "=qi",
    "FLOAT_INT": "=fi",
    "DOUBLE_INT": "=di",
    "LONG_DOUBLE_INT": "=gi",
}
"""Values with an index as they travel, without the gaps that they have in memory; ``g`` is a C long double."""
ACCESS_OPS: Final = (*REAL_OPS, "REPLACE", "NO_OP", "COMPARE_AND_SWAP")
"""Field ``op`` of ``access``: index of the operation on the target's memory."""
RUN: Final = struct.Struct("<qq")
"""A range of the target's memory, in the tail of ``access``: displacement from the window's base, bytes."""
MAX_RUNS: Final = 1024
"""Limit of runs in one ``access``."""
MAX_COUNTS: Final = 2048
"""Limit of counts in the tail of one ``collective``; if it has more, their address stands there instead."""

# fmt: off
CALLS: Final = (
    CallRow(1, "hello", "", (), Effect.LOCAL, Replay.AGAIN),
    CallRow(2, "describe", "", (), Effect.LOCAL, Replay.AGAIN),
    CallRow(3, "finish", "", (), Effect.LOCAL, Replay.AGAIN),
    CallRow(4, "abort", "i", ("code",), Effect.LOCAL, Replay.AGAIN),
    CallRow(5, "send", "BQiiqQ", ("flags", "comm", "dest", "tag", "num_bytes", "address"), Effect.SEND, Replay.ATTACH),
    CallRow(6, "receive", "BQiiqQ", ("flags", "comm", "source", "tag", "capacity", "address"),
         Effect.RECEIVE, Replay.ATTACH),
    CallRow(7, "probe", "BQii", ("flags", "comm", "source", "tag"), Effect.LOCAL, Replay.AGAIN),
    CallRow(8, "receive_message", "BQqQ", ("flags", "message", "capacity", "address"), Effect.RECEIVE, Replay.ATTACH),
    CallRow(9, "wait", "BBI", ("flags", "mode", "count"), Effect.LOCAL, Replay.AGAIN),
    CallRow(10, "cancel", "Q", ("request",), Effect.LOCAL, Replay.AGAIN),
    CallRow(11, "free", "Q", ("request",), Effect.LOCAL, Replay.AGAIN),
    CallRow(12, "fetch", "QQ", ("parcel", "address"), Effect.LOCAL, Replay.AGAIN),
    CallRow(13, "make_communicator", "QIQ", ("comm", "count", "world_ranks"), Effect.LOCAL, Replay.AGAIN),
    CallRow(14, "free_communicator", "Q", ("comm",), Effect.LOCAL, Replay.AGAIN),
    CallRow(15, "collective", "BBBBQiQqQqI",
         ("flags", "kind", "op", "type", "comm", "root", "send_address", "send_bytes", "receive_address",
          "receive_bytes", "num_counts"), Effect.COLLECTIVE, Replay.ATTACH),
    CallRow(16, "start_receive", "QQiiqQ", ("request", "comm", "source", "tag", "capacity", "address"),
         Effect.RECEIVE, Replay.POSTED),
    CallRow(17, "make_window", "QQ", ("window", "base"), Effect.LOCAL, Replay.AGAIN),
    CallRow(18, "free_window", "Q", ("window",), Effect.LOCAL, Replay.AGAIN),
    CallRow(19, "attach_memory", "QQq", ("window", "address", "num_bytes"), Effect.LOCAL, Replay.AGAIN),
    CallRow(20, "detach_memory", "QQ", ("window", "address"), Effect.LOCAL, Replay.AGAIN),
    CallRow(21, "access", "BBBBBQiQqQI",
         ("flags", "op", "type", "fetches", "unit", "window", "target", "data", "data_bytes", "result", "num_runs"),
         Effect.WINDOW, Replay.ATTACH),
    CallRow(22, "lock", "BQiB", ("flags", "window", "target", "exclusive"), Effect.WINDOW, Replay.ATTACH),
    CallRow(23, "unlock", "Qi", ("window", "target"), Effect.NOTICE, Replay.AGAIN),
    # One run, at the end, and its data as the tail: as they stand in a wire message.
    CallRow(24, "start_access", "QBBBQiQIqq",
         ("request", "op", "type", "fetches", "window", "target", "result", "num_data", "offset", "num_bytes"),
         Effect.WINDOW, Replay.POSTED),
)
# fmt: on

BY_NAME: Final = {call.name: call for call in CALLS}
BY_NUMBER: Final = {call.number: call for call in CALLS}

# Replies, with the status byte. ``request`` is 0 where the operation is complete and a completion follows.
HELLO_REPLY: Final = struct.Struct("<Bii")
REQUEST_REPLY: Final = struct.Struct("<BQ")
PROBE_REPLY: Final = struct.Struct("<BBiiqQ")
WAIT_REPLY: Final = struct.Struct("<BI")  # number of completions
INDEX: Final = struct.Struct("<I")  # in front of every completion of a wait: which of the requests asked for
COMPLETION: Final = struct.Struct("<iiqiBQ")
"""Source (world rank), tag, bytes of the message, MPI error class, :class:`PayloadPlace`, parcel."""

RECORDS: Final = {
    "HelloReply": (HELLO_REPLY, ("status", "rank", "size")),
    "RequestReply": (REQUEST_REPLY, ("status", "request")),
    "ProbeReply": (PROBE_REPLY, ("status", "found", "source", "tag", "num_bytes", "message")),
    "WaitReply": (WAIT_REPLY, ("status", "count")),
    "Failure": (FAILURE, ("status", "error", "num_bytes")),
    "Index": (INDEX, ("position",)),
    "Completion": (COMPLETION, ("source", "tag", "num_bytes", "error", "where", "parcel")),
    "Run": (RUN, ("offset", "num_bytes")),
}
"""Names of the records besides the calls, and of their fields."""


class PayloadPlace:
    """The place where the payload of a completion is."""

    NONE: Final = 0
    INLINE: Final = 1  # behind the completion, as many bytes as it counts (at most the capacity)
    WRITTEN: Final = 2  # at the address that the request named
    PARCEL: Final = 3  # fetch it by the parcel's number
    CANCELLED: Final = 4  # there is no message
