"""The upper half's memory, and buffers to carry it through."""

from __future__ import annotations

from remesh.mpi.arena import Arena
from remesh.mpi.channel import RemoteMemory
from remesh.mpi.lower.buffers import LargeBuffers
from remesh.mpi.lower.wire import PIECE_BYTES
from remesh.mpi.native import NATIVE

_MAX_SPARE = 8
_STAGING_BYTES = 1 << 19
"""Between two processes: it stays in a core's own cache."""


class UpperMemory:
    """Reads and writes the upper half's buffers; its process is known once it is attached."""

    def __init__(self) -> None:
        self._remote: RemoteMemory | None = None
        self._spare: list[bytearray] = []
        self._staging = bytearray(_STAGING_BYTES)
        self.large = LargeBuffers()
        self.arena: Arena | None = None
        """Where some of its buffers stand, for this process, too."""
        self.pid = 0
        """Of the upper half; 0 before it is attached."""

    def attach(self, pid: int) -> None:
        """The upper half runs (again) as process ``pid``."""
        self.pid = pid
        self._remote = RemoteMemory(pid)

    @property
    def _process(self) -> RemoteMemory:
        assert self._remote is not None, "no upper half is attached"
        return self._remote

    def view(self, address: int, num_bytes: int) -> memoryview | None:
        """Its bytes in place, if both halves have them; None if not."""
        return None if self.arena is None else self.arena.view(address, num_bytes)

    def read(self, address: int, num_bytes: int) -> bytearray:
        """A copy of its bytes."""
        view = self.view(address, num_bytes)
        return self._process.read(address, num_bytes) if view is None else bytearray(view)

    def read_into(self, address: int, view: memoryview) -> None:
        """Its bytes, as many as the view has."""
        self._process.read_into(address, view)

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        """Put bytes there."""
        self._process.write(address, data)

    def copy_from(self, pid: int, source: int, address: int, num_bytes: int) -> None:
        """Put bytes of another process there. OSError if it may not be read, or has ended."""
        staging = NATIVE.address_of(self._staging)
        NATIVE.relay(pid, source, self.pid, address, staging, _STAGING_BYTES, num_bytes)

    def copy_to(self, pid: int, source: int, address: int, num_bytes: int) -> None:
        """Put its bytes into another process. OSError if that may not be written, or has ended."""
        view = self.view(source, num_bytes)
        if view is not None:
            RemoteMemory(pid).write(address, view)
            return
        staging = NATIVE.address_of(self._staging)
        NATIVE.relay(self.pid, source, pid, address, staging, _STAGING_BYTES, num_bytes)

    def read_from(self, pid: int, source: int, view: memoryview) -> None:
        """Bytes of another process, as many as the view has."""
        RemoteMemory(pid).read_into(source, view)

    def borrow(self) -> bytearray:
        """A buffer of PIECE_BYTES with anything in it. Fresh ones cost page faults, so used ones are kept."""
        return self._spare.pop() if self._spare else bytearray(PIECE_BYTES)

    def give_back(self, buffer: bytearray | None) -> None:
        """A buffer from :meth:`borrow` that nothing refers to any more; None where none was needed."""
        if buffer is not None and len(self._spare) < _MAX_SPARE:
            self._spare.append(buffer)
