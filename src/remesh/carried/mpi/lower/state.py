"""The state of a lower half that outlives it, as bytes: JSON for the records, then the payloads, then a checksum.

8 bytes   magic and version
4 bytes   length of the JSON, little-endian
JSON      records; a payload is [offset, length] in what follows
payloads  one after another
4 bytes   CRC-32 of all before
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, Final

from remesh.carried.mpi.calls.table import Kind
from remesh.carried.mpi.lower.exposure import Asker, Exposure, Locks
from remesh.carried.mpi.lower.open_collectives import OpenCollective, read_shape, shape_values
from remesh.carried.mpi.lower.records import Arrived, Operation, Posted
from remesh.carried.mpi.lower.requests import COLLECTIVE, RECEIVE, SEND, WINDOW
from remesh.foundation.errors import FormatError

_MAGIC: Final = b"RMSHLOW3"
_EARLIER: Final = (b"RMSHLOW1", b"RMSHLOW2")
"""Versions of states without open collectives; and of those with small ones of one kind only."""
_LENGTH: Final = struct.Struct("<I")
_NUM_EARLIER, _EARLIER_STEP_BYTES = 5, 8
"""Length of a small collective's numbers in such a state; bytes of a step there."""

Payload = bytes | bytearray | None
_REQUEST: Final = (
    *("number", "kind", "comm", "peer", "tag", "address", "num_bytes", "done", "detached", "source", "message_tag"),
    *("message_bytes", "error", "cancelled", "written", "payload"),
)
_POSTED: Final = ("request", "comm", "source", "tag")
_ARRIVED: Final = ("comm", "source", "tag", "num_bytes", "payload", "sender_request")
"""Fields of the records that are kept."""
_KINDS: Final = {kind: kind for kind in (SEND, RECEIVE, COLLECTIVE, WINDOW)}


@dataclass(frozen=True, slots=True)
class SmallCollective:
    """A small collective that is messages of ours, and waits for a part."""

    request: int
    clock: int  # collectives entered before, on its communicator
    kind: int
    root: int  # rank in the communicator
    op: int
    type: int
    block_bytes: int  # what each member gives, or gets
    step: int  # how many of its plan are done
    operand: bytes  # the blocks of this rank, as far as they have come or are folded


@dataclass(frozen=True, slots=True)
class KeptPart:
    """A part of a small collective that has come, and that nobody has taken."""

    comm: int
    clock: int
    source: int
    error: int
    operand: bytes


@dataclass(frozen=True, slots=True)
class HalfState:
    """The whole state of a quiet lower half."""

    rank: int
    size: int
    next_numbers: dict[str, int]  # "request", "message", "parcel": never used before in the job
    requests: list[Any]  # Operation
    posted: list[Any]  # Posted, in order of posting within a communicator
    arrived: list[Any]  # Arrived, in order of arrival within a communicator
    messages: dict[int, Any]  # Arrived, taken by a matched probe
    owed: list[tuple[int, int]]  # matched announcements: number of the receive here, of the send there
    parcels: dict[int, bytes | bytearray]
    members: dict[int, tuple[int, ...]]  # world ranks of every communicator
    entered: dict[int, int]
    made: list[int]  # communicators that have had a real one
    open: list[OpenCollective]
    small: list[SmallCollective]
    parts: list[KeptPart]
    windows: dict[int, Exposure]
    attached: dict[int, tuple[int, int]]  # slot -> (number of its unanswered request, the operation it waits for)
    finished: bool


class _PayloadWriter:
    """A writer that lays payloads one after another."""

    def __init__(self) -> None:
        self.parts: list[bytes | bytearray] = []
        self._end = 0

    def put(self, payload: Payload) -> list[int] | None:
        if payload is None:
            return None
        self.parts.append(payload)
        self._end += len(payload)
        return [self._end - len(payload), len(payload)]


class _PayloadReader:
    """A reader that finds payloads again and checks every bound."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def take(self, place: Any) -> bytes | None:
        if place is None:
            return None
        offset, length = place
        if not 0 <= offset <= offset + length <= len(self._data):
            raise ValueError(f"payload at {place}, of {len(self._data)} bytes")
        return self._data[offset : offset + length]


def _checksum(data: bytes) -> int:
    from remesh.foundation.checksums import crc32  # noqa: PLC0415  # with ISA-L, which no rank needs before its first checkpoint

    return crc32(data)


def pack(records: dict[str, Any], payloads: list[bytes | bytearray]) -> bytes:
    """Pack records and payloads as the bytes of a state."""
    text = json.dumps(records, separators=(",", ":")).encode()
    body = b"".join([_MAGIC, _LENGTH.pack(len(text)), text, *payloads])
    return body + _LENGTH.pack(_checksum(body))


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Unpack the records and payloads of a state.

    Raises:
        FormatError: foreign, truncated or damaged.
    """
    if data[: len(_MAGIC)] not in (_MAGIC, *_EARLIER):
        raise _wrong("foreign", f"it begins with {bytes(data[: len(_MAGIC)])!r}, expected {_MAGIC!r}")
    head = len(_MAGIC) + _LENGTH.size
    if len(data) < head + _LENGTH.size or _checksum(data[: -_LENGTH.size]) != _LENGTH.unpack(data[-_LENGTH.size :])[0]:
        raise _wrong("damaged", f"its {len(data)} bytes do not have the checksum they end with")
    end = head + _LENGTH.unpack_from(data, len(_MAGIC))[0]
    try:
        records = json.loads(data[head:end])
    except ValueError as error:
        raise _wrong("damaged", f"its records are no JSON: {error}") from error
    if not isinstance(records, dict):
        raise _wrong("damaged", "its records are no JSON object")
    return records, bytes(data[end : -_LENGTH.size])


def _wrong(reason: str, what: str) -> FormatError:
    return FormatError(reason, f"reading the state of a lower half: {what}; take another checkpoint")


def save(parts: HalfState) -> bytes:
    """Write the state as bytes."""
    writer = _PayloadWriter()
    records = {
        "rank": parts.rank,
        "size": parts.size,
        "next": parts.next_numbers,
        "requests": [{**_record(r, _REQUEST), "payload": writer.put(r.payload)} for r in parts.requests],
        "posted": [_record(p, _POSTED) for p in parts.posted],
        "arrived": [_arrived_record(m, writer) for m in parts.arrived],
        "messages": [[number, _arrived_record(m, writer)] for number, m in parts.messages.items()],
        "owed": parts.owed,
        "parcels": [[number, writer.put(payload)] for number, payload in parts.parcels.items()],
        "members": [[number, list(members)] for number, members in parts.members.items()],
        "entered": list(parts.entered.items()),
        "made": parts.made,
        "open": [
            [one.request, one.comm, one.number, shape_values(one.shape), one.send_address, writer.put(one.send)]
            for one in parts.open
        ],
        "small": [[*_values(one)[:-1], writer.put(one.operand)] for one in parts.small],
        "parts": [[*_values(one)[:-1], writer.put(one.operand)] for one in parts.parts],
        "windows": [[number, *_window_record(window)] for number, window in parts.windows.items()],
        "attached": [[slot, *rest] for slot, rest in parts.attached.items()],
        "finished": parts.finished,
    }
    return pack(records, writer.parts)


def load(data: bytes, *, rank: int, size: int) -> HalfState:
    """Read the state that :func:`save` wrote, for the same rank of as many.

    Raises:
        FormatError: the bytes are damaged, or another rank's.
    """
    records, payloads = unpack(data)
    reader = _PayloadReader(payloads)
    try:
        if (records["rank"], records["size"]) != (rank, size):
            raise _wrong("other-rank", f"it is rank {records['rank']} of {records['size']}, expected {rank} of {size}")
        return HalfState(
            rank=rank,
            size=size,
            next_numbers={key: int(value) for key, value in records["next"].items()},
            requests=[_request(r, reader) for r in records["requests"]],
            posted=[Posted(**p) for p in records["posted"]],
            arrived=[_arrived(m, reader) for m in records["arrived"]],
            messages={number: _arrived(m, reader) for number, m in records["messages"]},
            owed=[(int(a), int(b)) for a, b in records["owed"]],
            parcels={number: reader.take(place) or b"" for number, place in records["parcels"]},
            members={number: tuple(members) for number, members in records["members"]},
            entered={int(number): int(count) for number, count in records["entered"]},
            # An earlier version wrote states only where all collectives had ended.
            made=[int(number) for number in records.get("made", dict(records["entered"]))],
            open=[_open(one, reader) for one in records.get("open", ())],
            small=[_small(one, reader) for one in records.get("small", ())],
            parts=[
                KeptPart(int(comm), int(clock), int(source), int(error), reader.take(place) or b"")
                for comm, clock, source, error, place in records.get("parts", ())
            ],
            windows={int(number): _window(size, *rest) for number, *rest in records.get("windows", ())},
            attached={int(slot): (int(a), int(b)) for slot, a, b in records["attached"]},
            finished=bool(records["finished"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, FormatError):
            raise
        raise _wrong("damaged", f"its records are not as expected: {type(error).__name__}: {error}") from error


def _values(of: Any) -> list[Any]:
    return [getattr(of, name) for name in of.__dataclass_fields__]


def _open(record: Any, reader: _PayloadReader) -> OpenCollective:
    request, comm, number, shape, address, place = record
    send = reader.take(place)
    found = read_shape(shape)
    if (send is None) != bool(address) or (send is not None and len(send) != found.send_bytes):
        raise ValueError(f"an open collective whose operand of {found.send_bytes} bytes is at {address} and {place}")
    return OpenCollective(int(request), int(comm), int(number), found, int(address), send)


def _small(record: Any, reader: _PayloadReader) -> SmallCollective:
    *numbers, place = record
    operand = reader.take(place) or b""
    if len(numbers) == _NUM_EARLIER:
        # All were of one kind, and what was done of a plan was counted in bytes.
        request, clock, op, type_, step_bytes = map(int, numbers)
        step = step_bytes // _EARLIER_STEP_BYTES
        return SmallCollective(request, clock, Kind.ALLREDUCE, 0, op, type_, len(operand), step, operand)
    request, clock, kind, root, op, type_, block_bytes, step = map(int, numbers)
    return SmallCollective(request, clock, Kind(kind), root, op, type_, block_bytes, step, operand)


def _record(of: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def _request(record: dict[str, Any], reader: _PayloadReader) -> Any:
    # The engine tells kinds by their identity: one word, one object.
    return Operation(**{**record, "kind": _KINDS[record["kind"]], "payload": reader.take(record["payload"])})


def _arrived_record(message: Any, writer: _PayloadWriter) -> dict[str, Any]:
    return {**_record(message, _ARRIVED), "payload": writer.put(message.payload)}


def _arrived(record: dict[str, Any], reader: _PayloadReader) -> Any:
    return Arrived(**{**record, "payload": reader.take(record["payload"])})


def _window_record(window: Exposure) -> list[Any]:
    askers = [[[a.rank, a.exclusive, a.request] for a in some] for some in (window.locks.holders, window.locks.waiting)]
    return [window.base, list(window.regions.items()), *askers]


def _window(size: int, base: Any, regions: Any, holders: Any, waiting: Any) -> Exposure:
    """Make a window of a job of so many ranks. ValueError for one that no lower half would have written."""
    places = {int(address): int(num_bytes) for address, num_bytes in regions}
    if int(base) < 0 or any(address < 0 or num_bytes < 0 for address, num_bytes in places.items()):
        raise ValueError(f"a window from {base} on with memory {places}")
    askers = [
        [Asker(int(rank), bool(alone), int(request)) for rank, alone, request in some] for some in (holders, waiting)
    ]
    wrong = [asker.rank for some in askers for asker in some if not 0 <= asker.rank < size]
    if wrong or (len(askers[0]) > 1 and any(holder.exclusive for holder in askers[0])):
        raise ValueError(f"a window locked by {askers[0]}, waited for by {askers[1]}, of {size} ranks")
    return Exposure(int(base), places, Locks(*askers))
