"""State of open collectives, and the part of it that outlives the library on which they were begun.

What was asked for, and the operand.

One that is open at a cut is complete on no member, so the operand is what it was: in the program, which must leave it
alone until the end, or here, where the program has asked for the result in the same place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from remesh.carried.mpi.calls.table import Kind
from remesh.carried.mpi.lower.real_collectives import CollectiveCall, RealCall, Result
from remesh.carried.mpi.lower.stand_ins import CallShape, ToldCall

SHAPE: Final = tuple(CallShape.__dataclass_fields__)


@dataclass(slots=True)
class OpenCall:
    """A collective that has been entered and is not complete."""

    request: Any
    number: int  # on its communicator: the first one is 1
    job: CollectiveCall
    result: Result = b""
    words: RealCall | None = None
    started: Any = None  # request of the real MPI


@dataclass(frozen=True, slots=True)
class OpenCollective:
    """A collective of the real MPI that has been entered and is not complete."""

    request: int
    comm: int
    number: int  # on its communicator: the first one is 1
    shape: CallShape
    send_address: int  # where the operand stands in the program; 0: it is in `send`
    send: bytes | None


def keep(begun: OpenCall) -> OpenCollective:
    """The part of an open collective that outlives the library."""
    job = begun.job
    send = None if job.send_address else bytes(job.send)
    return OpenCollective(begun.request.number, begun.request.comm, begun.number, shape_of(job), job.send_address, send)


def begin_from(kept: OpenCollective, request: Any, send: bytes | bytearray | memoryview) -> OpenCall:
    """Make the call again from what was kept, to be begun anew with its operand."""
    return OpenCall(request, kept.number, call_of(kept.shape, send, kept.send_address))


def call_of(shape: CallShape, send: bytes | bytearray | memoryview, send_address: int = 0) -> CollectiveCall:
    """Make the collective call that a shape describes, with an operand."""
    counts = (shape.send_counts, shape.receive_counts)
    kind = Kind(shape.kind)
    return CollectiveCall(kind, shape.root, shape.op, shape.type, send, shape.receive_bytes, *counts, send_address)


def of_engine(  # noqa: PLR0913 - in the order of the engine
    request: Any, number: int, kind: int, root: int, op: int, datatype: int, send: bytes, receive_bytes: int
) -> OpenCall:
    """Describe an open collective that the engine runs."""
    return OpenCall(request, number, CollectiveCall(Kind(kind), root, op, datatype, send, receive_bytes))


def shape_of(job: CollectiveCall) -> CallShape:
    """The arguments of a collective without the data."""
    counts = (tuple(job.send_counts), tuple(job.receive_counts))
    return CallShape(int(job.kind), job.root, job.op, job.type, len(job.send), job.receive_bytes, *counts)


def pack_told(told: Iterable[ToldCall]) -> bytes:
    """Pack the calls as bytes, a line for each."""
    return b"".join(json.dumps([*_values(one)]).encode() + b"\n" for one in told)


def unpack_told(lines: bytes) -> list[ToldCall]:
    """Unpack the lines that `pack_told` made, of any number of ranks."""
    found = []
    for line in lines.splitlines():
        comm, first, num_members, number, rank, shape = json.loads(line)
        found.append(ToldCall(comm, first, num_members, number, rank, read_shape(shape)))
    return found


def read_shape(values: list[Any]) -> CallShape:
    """Read a shape from JSON values; ValueError if they describe none."""
    kind, root, op, datatype, send_bytes, receive_bytes, send_counts, receive_counts = values
    lengths = (int(send_bytes), int(receive_bytes))
    counts = (tuple(map(int, send_counts)), tuple(map(int, receive_counts)))
    return CallShape(Kind(kind), int(root), int(op), int(datatype), *lengths, *counts)


def shape_values(shape: CallShape) -> list[Any]:
    """The JSON values of a shape."""
    return [getattr(shape, name) for name in SHAPE]


def _values(one: ToldCall) -> tuple[Any, ...]:
    return one.comm, one.first, one.num_members, one.number, one.rank, shape_values(one.shape)
