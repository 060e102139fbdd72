"""The upper half's memory, and buffers to carry it through."""

from __future__ import annotations

from remesh.carried.mpi.arena import Arena
from remesh.carried.mpi.calls.table import EAGER_BYTES
from remesh.carried.mpi.channel import RemoteMemory
from remesh.carried.mpi.lower.buffers import LargeBuffers


class UpperMemory:
    """The memory of the upper half, to read and write; its process is known once it is attached."""

    def __init__(self) -> None:
        self._remote: RemoteMemory | None = None
        self.large = LargeBuffers()
        self.arena: Arena | None = None
        """The arena, where some of its buffers stand for this process, too."""

    def attach(self, pid: int) -> None:
        """Attach to the upper half, which runs (again) as process ``pid``."""
        self._remote = RemoteMemory(pid)

    @property
    def _process(self) -> RemoteMemory:
        assert self._remote is not None, "no upper half is attached"
        return self._remote

    def view(self, address: int, num_bytes: int) -> memoryview | None:
        """A view of its bytes in place, if both halves have them; None if not."""
        return None if self.arena is None else self.arena.view(address, num_bytes)

    def read(self, address: int, num_bytes: int) -> bytearray:
        """A copy of its bytes."""
        view = self.view(address, num_bytes)
        return self._process.read(address, num_bytes) if view is None else bytearray(view)

    def operand(self, address: int, num_bytes: int, result: range) -> tuple[bytearray | memoryview, bool]:
        """The operand of a collective, while its result is written to these addresses: in place where that can be.

        With it comes whether the program has the same bytes there for as long as the collective is open.
        """
        if num_bytes <= EAGER_BYTES:
            return (self.read(address, num_bytes) if num_bytes else bytearray()), False
        place = self.view(address, num_bytes)
        # MPI wants operand and result apart, and the program may have asked for both in one place.
        is_apart = address + num_bytes <= result.start or result.stop <= address
        if place is not None and is_apart:
            return place, True
        copy = self.large.lend(num_bytes)
        if place is None:
            self.read_into(address, copy)
        else:
            copy[:] = place
        # A result that is not shared is written when it is complete.
        return copy, is_apart or place is None

    def read_into(self, address: int, view: memoryview) -> None:
        """Read its bytes into the view, as many as that has."""
        self._process.read_into(address, view)

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        """Write bytes there."""
        self._process.write(address, data)
