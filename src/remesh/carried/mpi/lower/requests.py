"""Operations that the upper half has started and not yet heard the end of."""

from __future__ import annotations

from array import array
from typing import Any, Final

from remesh.carried.mpi.calls.error_classes import CLASSES
from remesh.carried.mpi.lower.numbered import Numbered
from remesh.carried.mpi.lower.records import Operation
from remesh.carried.mpi.native import NATIVE

SEND: Final = "send"
RECEIVE: Final = "receive"
COLLECTIVE: Final = "collective"
WINDOW: Final = "window"
SUCCESS: Final = CLASSES["SUCCESS"]


class Requests:
    """All operations of a rank, by number."""

    def __init__(self) -> None:
        self.by_number = Numbered[Any]()
        self._next = array("Q", [1])
        self.news = False
        """Whether something has completed since its reader set this to False."""

    @property
    def next_number(self) -> int:
        """The number of the next operation whose number the upper half does not choose."""
        return self._next[0]

    @next_number.setter
    def next_number(self, number: int) -> None:
        self._next[0] = number

    @property
    def next_number_address(self) -> int:
        """The address where it stands, for the engine."""
        return int(NATIVE.address_of(self._next))

    def start(  # noqa: PLR0913 - the fields of a request
        self, *, kind: str, comm: int, peer: int, tag: int, address: int, num_bytes: int, number: int = 0
    ) -> Any:
        """Start an operation under a new number, or under the one that the upper half has chosen."""
        if not number:
            number, self.next_number = self.next_number, self.next_number + 1
        request = Operation(number, kind, comm, peer, tag, address, num_bytes)
        self.by_number[request.number] = request
        return request

    def complete(self, request: Any) -> None:
        """Note that the operation is over; its completion waits to be told."""
        request.done = True
        self.news = True
        if request.detached:
            self.forget(request)

    def forget(self, request: Any) -> None:
        """Drop an operation whose completion has been told."""
        self.by_number.pop(request.number, None)

    def detach(self, number: int) -> None:
        """Mark an operation whose completion nobody will ask for."""
        request = self.by_number.get(number)
        if request is not None:
            request.detached = True
            if request.done:
                self.forget(request)
