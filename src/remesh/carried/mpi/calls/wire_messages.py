"""Wire messages between lower halves: kinds and layout."""

from __future__ import annotations

import enum
import struct
from typing import Final

HEADER: Final = struct.Struct("<QihHiiQQQ")
HEADER_FIELDS: Final = ("comm", "tag", "what", "core", "source", "pid", "request", "num_bytes", "address")
"""Communicator, tag (WANTED: bytes that came ahead; GIVEN_UP: bytes of a piece), :class:`What`, core on which the
sender's program last called (plus 1; 0: not known), sender, process that has the payload or its place (0: not sent;
ANNOUNCED_AHEAD: tag of what comes ahead), request of who is spoken to (ANNOUNCED: of the sender), bytes of the message
(or a stream's tag, or the receive that wants help), address of the payload or its place (or bytes of a stream's
pieces, or of what came ahead)."""

Fields = tuple[int, int, int, int, int, int, int]
"""The fields of a header, without the sender: communicator, tag, what, request, bytes, process, address."""


class What(enum.IntEnum):
    """Kinds of wire messages."""

    MESSAGE = 0  # header and payload
    ANNOUNCED = 1  # header of a message whose payload stays at the sender until asked for
    WANTED = 2  # the receiver asks for it, and names the tag of the stream; or for its half, and names where to
    TAKEN = 3  # the receiver has read it where it was
    JOIN = 4  # a rank waits for a communicator to be made
    GO = 5  # all its members do: make it
    ANNOUNCED_WAITING = 6  # ANNOUNCED by a program that waits until its payload has been taken
    HELPED = 7  # the sender has written its half where the receiver wanted it (bytes: 1), or may not (0)
    ACCESS = 8  # to a window: tag is what to do, process is the number of runs, address the place in the access
    ACCESSED = 9  # its answer: tag is the error class, payload what was fetched
    LOCK = 10  # of a window; tag: 1 if no other rank may have it
    LOCKED = 11  # it is the asker's; tag is the error class
    UNLOCK = 12
    PART = 13  # of a collective: tag is the error class, request its clock, payload what is folded so far
    ANNOUNCED_AHEAD = 14  # ANNOUNCED, and its first PIECE_BYTES, or all of it, are on their way in two pieces
    ANNOUNCED_AHEAD_WHOLE = 15  # the same as one piece: nothing is copied at the sender
    DECLINED = 16  # the receiver is closed and no receive has matched: nothing shall count as sent ahead
    GIVEN_UP = 17  # it does not; the receiver may take it from MPI and throw it away
