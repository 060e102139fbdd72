"""How a snapshot crosses from a worker to the agent of its keeper: one connection, one parcel.

    agent:   32 random bytes, the challenge
    worker:  its parcel as one JSON line, with the token's proof over challenge and parcel
    agent:   one byte: come, or no room
    worker:  the bytes
    agent:   one byte, once they are kept and their checksum fits

Whoever has no proof is dropped before a byte of memory is taken for it; whoever is slow later, after SEND_TIMEOUT_S of
silence.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass

from remesh.checksums import crc32
from remesh.comm.token import Token
from remesh.elastic.snapshots.form import COMPLETE_AT, HEADER_BYTES
from remesh.errors import PeerError

CHALLENGE_BYTES = 32
MAX_PARCEL_BYTES = 1024
SEND_TIMEOUT_S = 10.0
"""Longest silence on a connection."""
KEPT = b"\1"
_COME, _NO_ROOM = b"\2", b"\3"
_CHUNK_BYTES = 1 << 20
_PLACE = "snapshot"


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is being sent, and whose it is."""

    generation: int
    rank: int
    nbytes: int
    """Invariant: as many bytes follow."""
    crc: int
    """CRC-32 of the bytes."""


def pack_parcel(generation: int, rank: int, data: memoryview) -> tuple[Parcel, bytes]:
    """The parcel for a snapshot, and its header as it travels: not complete, until the receiver has all of it."""
    head = bytearray(data[:HEADER_BYTES])
    head[COMPLETE_AT] = 0
    crc = crc32(data[HEADER_BYTES:], crc32(head))
    return Parcel(generation, rank, len(data), crc), bytes(head)


def send_parcel(connection: socket.socket, parcel: Parcel, head: bytes, data: memoryview, token: Token) -> None:
    """Send one parcel, as packed; blocks until the agent keeps it. OSError, with the reason, when it does not."""
    connection.settimeout(SEND_TIMEOUT_S)
    challenge = _receive(connection, CHALLENGE_BYTES)
    text = json.dumps(asdict(parcel)).encode()
    mac = token.sign(_PLACE, challenge + text).hex().encode()
    connection.sendall(mac + b" " + text + b"\n")
    if _receive(connection, 1) != _COME:
        raise ConnectionRefusedError(f"its keeper's host has no room for {parcel.nbytes} bytes")
    connection.sendall(head)
    for start in range(HEADER_BYTES, len(data), _CHUNK_BYTES):
        connection.sendall(data[start : start + _CHUNK_BYTES])
    if _receive(connection, 1) != KEPT:
        raise ConnectionAbortedError("it came to its keeper damaged")


def receive_parcel(
    connection: socket.socket, token: Token, make_room: Callable[[Parcel], memoryview | None]
) -> Parcel | None:
    """Take one parcel into the room that ``make_room`` gives for it.

    None when it gives none, which the sender is told. PeerError when the sender has no proof or sends nonsense, OSError
    when it is slow or gone. The caller checks the bytes and answers KEPT.
    """
    connection.settimeout(SEND_TIMEOUT_S)
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    connection.sendall(challenge)
    mac, _, text = _receive_line(connection).partition(b" ")
    try:
        is_ours = token.fits(_PLACE, challenge + text, bytes.fromhex(mac.decode()))
    except ValueError:
        is_ours = False
    if not is_ours:
        raise PeerError("taking a snapshot: the sender does not have this job's token; the connection is dropped")
    try:
        parcel = Parcel(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise PeerError(f"taking a snapshot: found {text[:80]!r}, expected a parcel") from error
    room = make_room(parcel)
    connection.sendall(_NO_ROOM if room is None else _COME)
    if room is None:
        return None
    at = 0
    while at < parcel.nbytes:
        count = connection.recv_into(room[at : min(parcel.nbytes, at + _CHUNK_BYTES)])
        if not count:
            raise ConnectionResetError(f"the sender of a snapshot went away after {at} of {parcel.nbytes} bytes")
        at += count
    return parcel


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the connection was closed")
        data += more
    return data


def _receive_line(connection: socket.socket) -> bytes:
    """Up to a line's end, one byte at a time: what follows belongs to the snapshot."""
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > MAX_PARCEL_BYTES:
            raise PeerError(f"taking a snapshot: a parcel is longer than {MAX_PARCEL_BYTES} bytes")
        line += _receive(connection, 1)
    return line[:-1]
