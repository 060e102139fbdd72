"""Transfer of a snapshot from a worker to the agent that keeps its second copy.

It uses one connection (`remesh.wire.messages`) for each snapshot.

    worker:  parcel      owner, number of bytes and their checksum
    agent:   come, or no-room
    worker:  the bytes
    agent:   kept, once its memory has them and their checksum fits

No memory is taken for a peer that does not know the token; a connection is dropped after SEND_TIMEOUT_S of silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from remesh.elasticity.snapshots.snapshot_header import COMPLETE_AT, HEADER_BYTES
from remesh.foundation.checksums import crc32
from remesh.foundation.errors import PeerError
from remesh.foundation.settings import timeout_s
from remesh.wire.messages import Line

SEND_TIMEOUT_S = timeout_s(10.0)
"""Longest silence on a connection."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """The header of a snapshot that is sent: whose it is, its length and its checksum."""

    generation: int
    rank: int
    nbytes: int
    """Invariant: as many bytes follow."""
    crc: int
    """CRC-32 of the bytes."""


def send_parcel(line: Line, generation: int, rank: int, data: memoryview) -> None:
    """Send one snapshot, as not complete; blocks until the agent keeps it. OSError, with the reason, when it does not.

    What is sent is marked complete by its receiver, which has all of it then.
    """
    head = bytearray(data[:HEADER_BYTES])
    head[COMPLETE_AT] = 0
    body = data[HEADER_BYTES:]
    parcel = Parcel(generation, rank, len(data), crc32(body, crc32(head)))
    line.send({"type": "parcel", **asdict(parcel)})
    if _receive_type(line) != "come":
        raise ConnectionRefusedError(f"the host that stores it has no memory for {parcel.nbytes} bytes")
    line.send_payload(memoryview(head))
    line.send_payload(body)
    if _receive_type(line) != "kept":
        raise ConnectionAbortedError("it was damaged on the way")


def receive_parcel(line: Line, make_room: Callable[[Parcel], memoryview | None]) -> bool:
    """Take one parcel into the room that ``make_room`` gives for it; whether it is there, and whole.

    Not when there is no room for it, which is reported to the sender. PeerError or FormatError when the sender has no
    proof or sends nonsense, OSError when it is slow or gone. The caller answers `report_kept`.
    """
    message = line.receive()
    if message is None:
        return False
    try:
        kind = message.pop("type")
        parcel = Parcel(**message)
        is_parcel = kind == "parcel" and all(type(value) is int for value in message.values())
    except TypeError:
        is_parcel = False
    if not is_parcel:
        raise PeerError(f"taking a snapshot: found {str(message)[:80]}, expected a parcel")
    room = make_room(parcel)
    line.send({"type": "come" if room is not None else "no-room"})
    if room is None:
        return False
    line.receive_payload(room)
    return bool(crc32(room) == parcel.crc)


def report_kept(line: Line) -> None:
    """The snapshot is kept."""
    line.send({"type": "kept"})


def _receive_type(line: Line) -> str:
    answer = line.receive()
    if answer is None:
        raise ConnectionResetError("its keeper hung up")
    return str(answer["type"])
