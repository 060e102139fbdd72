"""Operations that the upper half has started and not yet heard the end of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from remesh.mpi.calls.error_classes import CLASSES
from remesh.mpi.calls.table import ANY

SEND: Final = "send"
RECEIVE: Final = "receive"
COLLECTIVE: Final = "collective"
WINDOW: Final = "window"

SUCCESS: Final = CLASSES["SUCCESS"]
ERR_TRUNCATE: Final = CLASSES["ERR_TRUNCATE"]


@dataclass(slots=True)
class Request:
    """One operation; complete when ``done``, gone when its completion has been told."""

    number: int  # the virtual handle; never used twice in a job
    kind: str  # SEND, RECEIVE, COLLECTIVE, WINDOW
    comm: int  # or the window
    peer: int  # world rank: destination of a send, target of an access; source a receive asks for, or ANY
    tag: int
    address: int  # in the upper half: where the payload is read from or written to; 0: nowhere
    num_bytes: int  # of the send; of a receive the capacity, or PARCEL
    done: bool = False
    detached: bool = False  # nobody will ask for it: forget it when done
    source: int = ANY  # of the message that came, world rank
    message_tag: int = ANY
    message_bytes: int = 0
    error: int = SUCCESS
    cancelled: bool = False
    written: bool = False  # the payload stands at ``address`` already
    payload: bytes | bytearray | None = None  # of a completed receive or collective, until it is told


class Requests:
    """All operations of a rank, by number."""

    def __init__(self, make: Callable[..., Request] = Request) -> None:
        """``make`` has the arguments of `Request`, and what it returns has its attributes."""
        self._make = make
        self.by_number: dict[int, Request] = {}
        self.next_number = 1
        self.news = False
        """Whether something has completed since its reader set this to False."""

    def start(  # noqa: PLR0913 - the fields of a request
        self, *, kind: str, comm: int, peer: int, tag: int, address: int, num_bytes: int, number: int = 0
    ) -> Request:
        """A new operation under a new number, or the one that the upper half has chosen."""
        if not number:
            number, self.next_number = self.next_number, self.next_number + 1
        request = self._make(number, kind, comm, peer, tag, address, num_bytes)
        self.by_number[request.number] = request
        return request

    def complete(self, request: Request) -> None:
        """The operation is over; its completion waits to be told."""
        request.done = True
        self.news = True
        if request.detached:
            self.forget(request)

    def forget(self, request: Request) -> None:
        """Its completion has been told."""
        self.by_number.pop(request.number, None)

    def detach(self, number: int) -> None:
        """Nobody will ask for its completion."""
        request = self.by_number.get(number)
        if request is not None:
            request.detached = True
            if request.done:
                self.forget(request)
