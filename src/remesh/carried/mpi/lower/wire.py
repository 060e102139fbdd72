"""All point-to-point traffic of a rank on one duplicate of the world communicator, as bytes.

Two kinds of MPI messages. *Wire messages* have tag 0: a header, and the payload if it is short; all are counted.
*Streams* have another tag: the payload of one announced message, in pieces, after the receiver has asked for it on a
tag that it chose; PIECE_BYTES may go ahead of that, on a tag that the sender chose. A stream is never open across a
checkpoint. The engine sends, takes and counts them all (``_engine_wire.c``, ``_engine_streams.c``).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Final

from remesh.carried.mpi.calls.table import EAGER_BYTES
from remesh.carried.mpi.calls.wire_messages import HEADER, Fields
from remesh.foundation.settings import WIRE_DIRECT, WIRE_PROBES

_FRAME_BYTES: Final = HEADER.size + EAGER_BYTES
_PLACE_BYTES: Final = 16
PIECE_BYTES: Final = 1 << 20
"""Limit of a stream's pieces, but between two arenas, and of data ahead: long enough for the real MPI's best rate."""


class Wire:
    """The communicator of the wire, the receives that are posted on it, and the ranks that can be reached past it."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.frame = bytearray(_FRAME_BYTES)
        """The buffer into which wire messages are received."""
        self.posted = None
        """The receive for wire messages; None if the engine has to look for them."""
        if not WIRE_PROBES.read():
            self.posted = comm.Recv_init([self.frame, mpi.BYTE], mpi.ANY_SOURCE, 0)
            self.posted.Start()
        self.neighbours: frozenset[int] = self._find_neighbours() if WIRE_DIRECT.read() else frozenset()
        """Ranks whose processes can be named by the ids that this one sees; empty unless the network is memory."""
        self.engine: Any = None

    def _find_neighbours(self) -> frozenset[int]:
        """Find the ranks that can be reached past the wire. All ranks call this."""
        place = f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {os.stat('/proc/self/ns/pid').st_ino}"
        own = hashlib.blake2b(place.encode(), digest_size=_PLACE_BYTES).digest()
        all_places = bytearray(_PLACE_BYTES * self.size)
        self.comm.Allgather([own, self._mpi.BYTE], [all_places, self._mpi.BYTE])
        places = [bytes(all_places[start : start + _PLACE_BYTES]) for start in range(0, len(all_places), _PLACE_BYTES)]
        return frozenset(rank for rank, other in enumerate(places) if other == own and rank != self.rank)

    def send(self, dest: int, header: Fields, payload: bytes | bytearray | memoryview = b"") -> None:
        """Hand one wire message to MPI; ``payload`` has been copied when this returns."""
        self.engine.send(dest, header, payload)

    def address_of(self, request: Any) -> int:
        """Address of the handle of an MPI request, which is null once it is over."""
        return int(self._mpi._addressof(request))

    def release(self) -> None:
        """Take back the posted receive; the communicator is the caller's."""
        if self.posted is not None:
            self.posted.Cancel()
            self.posted.Wait()
            self.posted.Free()
