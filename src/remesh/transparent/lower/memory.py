"""The upper half's memory, and buffers to carry it through."""

from __future__ import annotations

from remesh.transparent.channel import RemoteMemory
from remesh.transparent.lower.wire import PIECE_BYTES

_MAX_SPARE = 16


class UpperMemory:
    """Reads and writes the upper half's buffers; its process is known once it is attached."""

    def __init__(self) -> None:
        self._remote: RemoteMemory | None = None
        self._spare: list[bytearray] = []

    def attach(self, pid: int) -> None:
        """The upper half runs (again) as process ``pid``."""
        self._remote = RemoteMemory(pid)

    @property
    def _process(self) -> RemoteMemory:
        assert self._remote is not None, "no upper half is attached"
        return self._remote

    def read(self, address: int, num_bytes: int) -> bytearray:
        """A copy of its bytes."""
        return self._process.read(address, num_bytes)

    def read_into(self, address: int, view: memoryview) -> None:
        """Its bytes, as many as the view has."""
        self._process.read_into(address, view)

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        """Put bytes there."""
        self._process.write(address, data)

    def borrow(self) -> bytearray:
        """A buffer of PIECE_BYTES with anything in it. Fresh ones cost page faults, so used ones are kept."""
        return self._spare.pop() if self._spare else bytearray(PIECE_BYTES)

    def give_back(self, buffer: bytearray) -> None:
        """A buffer from :meth:`borrow` that nothing refers to any more."""
        if len(self._spare) < _MAX_SPARE:
            self._spare.append(buffer)
