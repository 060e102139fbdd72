"""All point-to-point traffic of a rank on one duplicate of the world communicator, as bytes.

Two kinds of MPI messages. *Wire messages* have tag 0: a header, and the payload if it is short; all are counted.
*Streams* have another tag that the receiver chose: the payload of one announced message, in pieces, after the receiver
has asked for it. A stream is open only between that and its end, never across a checkpoint.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any, Final

from remesh.transparent.calls.table import EAGER_BYTES

HEADER: Final = struct.Struct("<QiiQQ")
"""Communicator, tag, :class:`What`, request at the sender of the payload, bytes of the message (or a stream's tag)."""
_FRAME_BYTES: Final = HEADER.size + EAGER_BYTES
PROBE_VARIABLE: Final = "REMESH_WIRE_PROBES"
"""Set for a network on which a receive from any source, once posted, may never complete: look for messages instead."""
_NUM_STREAM_TAGS: Final = 30_000
"""MPI promises tags up to 32767."""
PIECE_BYTES: Final = 1 << 19
"""Of a stream: long enough for the real MPI's best rate, short enough to overlap copies with it."""


class What:
    """Kinds of wire messages."""

    MESSAGE: Final = 0  # header and payload
    ANNOUNCED: Final = 1  # header of a message whose payload stays at the sender until asked for
    WANTED: Final = 2  # the receiver asks for it, and names the tag of the stream


class Wire:
    """Sends and takes wire messages, counts them, and finishes what MPI has not finished yet."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.sent = [0] * self.size
        self.received = [0] * self.size
        self._frame = bytearray(_FRAME_BYTES)
        self._frame_view = memoryview(self._frame)
        self._status = mpi.Status()
        self._posted = None
        if not os.environ.get(PROBE_VARIABLE):
            self._posted = comm.Recv_init([self._frame, mpi.BYTE], mpi.ANY_SOURCE, 0)
            self._posted.Start()
        self._unsent: list[tuple[Any, bytes]] = []
        self._next_stream = 0
        self.on_message: Callable[[int, tuple[Any, ...], memoryview], None] | None = None
        """Called with source, the header's fields, and the payload (valid during the call)."""

    def send(self, dest: int, header: tuple[int, int, int, int, int], payload: bytes | memoryview = b"") -> None:
        """Hand one wire message to MPI; ``payload`` has been copied when this returns."""
        frame = HEADER.pack(*header) + payload
        self.sent[dest] += 1
        self._unsent.append((self._comm.Isend([frame, self._mpi.BYTE], dest, 0), frame))

    def poll(self) -> bool:
        """Take one wire message if there is one, and look after those on their way; whether one was taken."""
        if self._unsent:
            self._unsent = [entry for entry in self._unsent if not entry[0].Test()]
        if not self._has_frame():
            return False
        num_bytes = self._status.Get_count(self._mpi.BYTE)
        source = self._status.Get_source()
        self.received[source] += 1
        fields = HEADER.unpack_from(self._frame)
        assert self.on_message is not None
        self.on_message(source, fields, self._frame_view[HEADER.size : num_bytes])
        if self._posted is not None:
            self._posted.Start()
        return True

    def _has_frame(self) -> bool:
        """Whether a wire message now stands in the frame; the status tells of it."""
        if self._posted is not None:
            return bool(self._posted.Test(self._status))
        message = self._comm.Improbe(self._mpi.ANY_SOURCE, 0)
        if message is None:
            return False
        message.Recv([self._frame, self._mpi.BYTE], self._status)
        return True

    @property
    def handed_over(self) -> bool:
        """Whether MPI is done with the buffers of all wire messages sent."""
        return not self._unsent

    def new_stream_tag(self) -> int:
        """A tag for a stream to this rank that no other open stream to it has."""
        self._next_stream = (self._next_stream + 1) % _NUM_STREAM_TAGS
        return 1 + self._next_stream

    def receive_piece(self, source: int, tag: int, piece: memoryview) -> Any:
        """Start to take a piece of a stream; an MPI request."""
        return self._comm.Irecv([piece, self._mpi.BYTE], source, tag)

    def send_piece(self, dest: int, tag: int, piece: bytes | bytearray | memoryview) -> Any:
        """Start to send a piece of a stream; an MPI request. The caller keeps ``piece`` alive."""
        return self._comm.Isend([piece, self._mpi.BYTE], dest, tag)

    def release(self) -> None:
        """Take back the posted receive; the communicator is the caller's."""
        if self._posted is not None:
            self._posted.Cancel()
            self._posted.Wait()
            self._posted.Free()
