"""All point-to-point traffic of a rank on one duplicate of the world communicator, as bytes.

Two kinds of MPI messages. *Wire messages* have tag 0: a header, and the payload if it is short; all are counted.
*Streams* have another tag: the payload of one announced message, in pieces, after the receiver has asked for it on a
tag that it chose; PIECE_BYTES may go ahead of that, on a tag that the sender chose. A stream is never open across a
checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from remesh.mpi.calls.table import EAGER_BYTES

HEADER: Final = struct.Struct("<QiiiiQQQ")
"""Communicator, tag (WANTED: bytes that came ahead; GIVEN_UP: bytes of a piece), :class:`What`, sender, process that
has the payload or its place (0: not told; ANNOUNCED_AHEAD: tag of what comes ahead), request of who is spoken to
(ANNOUNCED: of the sender), bytes of the message (or a stream's tag, or the receive that wants help), address of the
payload or its place (or bytes of a stream's pieces, or of what came ahead)."""
_FRAME_BYTES: Final = HEADER.size + EAGER_BYTES
PROBE_VARIABLE: Final = "REMESH_WIRE_PROBES"
"""Set for a network on which a receive from any source, once posted, may never complete: look for messages instead."""
DIRECT_VARIABLE: Final = "REMESH_WIRE_DIRECT"
"""Set where the network is the shared memory of one host: long payloads are then read where they are, past MPI."""
_PLACE_BYTES: Final = 16
_NUM_STREAM_TAGS: Final = 15_000
"""Of receivers, from 1 on; as many of senders follow. MPI promises tags up to 32767."""
PIECE_BYTES: Final = 1 << 20
"""Most of a stream's pieces, but between two arenas, and what goes ahead: long enough for the real MPI's best rate."""
COPIED_PIECE_BYTES: Final = PIECE_BYTES // 2
"""Of pieces that are copied: short enough to overlap the copies with the network, and to stay in a core's cache."""


Fields = tuple[int, int, int, int, int, int, int]
"""Of a header, without the sender: communicator, tag, what, request, bytes, process, address."""


class What:
    """Kinds of wire messages."""

    MESSAGE: Final = 0  # header and payload
    ANNOUNCED: Final = 1  # header of a message whose payload stays at the sender until asked for
    WANTED: Final = 2  # the receiver asks for it, and names the tag of the stream; or for its half, and says where to
    TAKEN: Final = 3  # the receiver has read it where it was
    JOIN: Final = 4  # a rank waits for a communicator to be made
    GO: Final = 5  # all its members do: make it
    ANNOUNCED_WAITING: Final = 6  # ANNOUNCED by a program that waits until its payload has been taken
    HELPED: Final = 7  # the sender has written its half where the receiver wanted it (bytes: 1), or may not (0)
    ACCESS: Final = (
        8  # to a window: tag says what to do, process is the number of runs, address the place in the access
    )
    ACCESSED: Final = 9  # its answer: tag is the error class, payload what was fetched
    LOCK: Final = 10  # of a window; tag: 1 if nobody else may have it
    LOCKED: Final = 11  # it is the asker's; tag is the error class
    UNLOCK: Final = 12
    PART: Final = 13  # of a collective: tag is the error class, request its clock, payload what is folded so far
    ANNOUNCED_AHEAD: Final = 14  # ANNOUNCED, and its first PIECE_BYTES, or all of it, are on their way in two pieces
    ANNOUNCED_AHEAD_WHOLE: Final = 15  # the same as one piece: nothing is copied at the sender
    DECLINED: Final = 16  # the receiver is closed and no receive has matched: nothing shall count as sent ahead
    GIVEN_UP: Final = 17  # it does not; the receiver may take it from MPI and throw it away


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a rank sends of a message before it is wanted."""

    source: int  # world rank
    tag: int  # of the stream
    num_bytes: int
    piece_bytes: int  # the last piece may have less

    def __post_init__(self) -> None:
        is_tag = _NUM_STREAM_TAGS < self.tag <= 2 * _NUM_STREAM_TAGS
        is_in_two = self.num_bytes <= 2 * self.piece_bytes <= 2 * PIECE_BYTES
        if not (is_tag and is_in_two and 0 < self.num_bytes <= PIECE_BYTES):
            raise ValueError(
                f"rank {self.source} sends {self.num_bytes} bytes ahead in pieces of {self.piece_bytes} with tag "
                f"{self.tag}, expected 1 to {PIECE_BYTES} in at most two pieces with a tag from "
                f"{_NUM_STREAM_TAGS + 1} to {2 * _NUM_STREAM_TAGS}; run one version of remesh on all ranks"
            )

    @property
    def pieces(self) -> list[int]:
        """Bytes of each."""
        starts = range(0, self.num_bytes, self.piece_bytes)
        return [min(self.piece_bytes, self.num_bytes - start) for start in starts]


WITH_PAYLOAD: Final = frozenset((What.MESSAGE, What.ACCESS, What.ACCESSED, What.PART))
OF_WINDOWS: Final = frozenset((What.ACCESS, What.ACCESSED, What.LOCK, What.LOCKED, What.UNLOCK))


class Wire:
    """Sends and takes wire messages, counts them, and finishes what MPI has not finished yet."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._sent = [0] * self.size
        self._received = [0] * self.size
        self.frame = bytearray(_FRAME_BYTES)
        self._frame_view = memoryview(self.frame)
        self.posted = None
        if not os.environ.get(PROBE_VARIABLE):
            self.posted = comm.Recv_init([self.frame, mpi.BYTE], mpi.ANY_SOURCE, 0)
            self.posted.Start()
        self._unsent: list[tuple[Any, bytes]] = []
        self._next_stream = 0
        self.neighbours: frozenset[int] = self._find_neighbours() if os.environ.get(DIRECT_VARIABLE) else frozenset()
        """Ranks whose processes can be named by the ids that this one sees; empty unless the network is memory."""
        self.engine: Any = None
        """Takes over the wire messages, both ways, where it is there."""
        self.on_message: Callable[[int, tuple[Any, ...], memoryview], None] | None = None
        """Called with source, the header's fields, and the payload (valid during the call)."""

    def _find_neighbours(self) -> frozenset[int]:
        """All ranks call this."""
        place = f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {os.stat('/proc/self/ns/pid').st_ino}"
        own = hashlib.blake2b(place.encode(), digest_size=_PLACE_BYTES).digest()
        all_places = bytearray(_PLACE_BYTES * self.size)
        self.comm.Allgather([own, self._mpi.BYTE], [all_places, self._mpi.BYTE])
        places = [bytes(all_places[start : start + _PLACE_BYTES]) for start in range(0, len(all_places), _PLACE_BYTES)]
        return frozenset(rank for rank, other in enumerate(places) if other == own and rank != self.rank)

    def send(self, dest: int, header: Fields, payload: bytes | bytearray | memoryview = b"") -> None:
        """Hand one wire message to MPI; ``payload`` has been copied when this returns."""
        if self.engine is not None:
            self.engine.send(dest, header, payload)
            return
        comm, tag, what, request, num_bytes, pid, address = header
        frame = HEADER.pack(comm, tag, what, self.rank, pid, request, num_bytes, address) + payload
        self._sent[dest] += 1
        self._unsent.append((self.comm.Isend([frame, self._mpi.BYTE], dest, 0), frame))

    def poll(self) -> bool:
        """Take one wire message if there is one, and look after those on their way; whether one was taken."""
        if self.engine is not None:
            return False
        if self._unsent:
            self._unsent = [entry for entry in self._unsent if not entry[0].Test()]
        if not self._has_frame():
            return False
        comm, tag, what, source, pid, request, num_bytes, address = HEADER.unpack_from(self.frame)
        self._received[source] += 1
        assert self.on_message is not None
        end = HEADER.size + (num_bytes if what in WITH_PAYLOAD else 0)
        fields = (comm, tag, what, request, num_bytes, pid, address)
        self.on_message(source, fields, self._frame_view[HEADER.size : end])
        if self.posted is not None:
            self.posted.Start()
        return True

    def _has_frame(self) -> bool:
        """Whether a wire message now stands in the frame."""
        if self.posted is not None:
            return bool(self.posted.Test())
        message = self.comm.Improbe(self._mpi.ANY_SOURCE, 0)
        if message is None:
            return False
        message.Recv([self.frame, self._mpi.BYTE])
        return True

    @property
    def handed_over(self) -> bool:
        """Whether MPI is done with the buffers of all wire messages sent."""
        return not self._unsent and (self.engine is None or self.engine.handed_over)

    @property
    def sent(self) -> list[int]:
        """Wire messages handed to MPI, for each world rank."""
        return self._sent if self.engine is None else list(self.engine.sent)

    @property
    def received(self) -> list[int]:
        """Wire messages taken from each world rank."""
        return self._received if self.engine is None else list(self.engine.received)

    def new_stream_tag(self) -> int:
        """A tag for a stream to this rank that no other open stream to it has, but for what comes ahead."""
        if self.engine is not None:
            return int(self.engine.new_stream_tag())
        self._next_stream = (self._next_stream + 1) % _NUM_STREAM_TAGS
        return 1 + self._next_stream

    def receive_piece(self, source: int, tag: int, piece: memoryview) -> Any:
        """Start to take a piece of a stream; an MPI request."""
        return self.comm.Irecv([piece, self._mpi.BYTE], source, tag)

    def send_piece(self, dest: int, tag: int, piece: bytes | bytearray | memoryview) -> Any:
        """Start to send a piece of a stream; an MPI request. The caller keeps ``piece`` alive."""
        return self.comm.Isend([piece, self._mpi.BYTE], dest, tag)

    def address_of(self, request: Any) -> int:
        """Where the handle of an MPI request stands, which is null once it is over."""
        return int(self._mpi._addressof(request))

    def release(self) -> None:
        """Take back the posted receive; the communicator is the caller's."""
        if self.posted is not None:
            self.posted.Cancel()
            self.posted.Wait()
            self.posted.Free()
