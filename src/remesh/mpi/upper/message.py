"""Probes, and messages that a matched probe has taken out of the queue."""

from __future__ import annotations

from typing import Any, Self

from remesh.mpi.calls.table import CallFlag
from remesh.mpi.upper import constants as k
from remesh.mpi.upper.buffers import Parcel, parse, parse_for
from remesh.mpi.upper.exceptions import failure, numbered_failure
from remesh.mpi.upper.handles import Handle
from remesh.mpi.upper.link import Completion, Landing, link
from remesh.mpi.upper.membership import Members
from remesh.mpi.upper.pickles import loads
from remesh.mpi.upper.request import Operation, Request, Work
from remesh.mpi.upper.status import Status


class _Taken:
    """Content of a Message."""

    def __init__(self, members: Members | None, number: int) -> None:
        self.members, self.number = members, number


def probe(members: Members, source: int, tag: int, status: Status | None, flags: int) -> int | None:
    """Look for a message: its number (0 if it was not taken), or None."""
    if source == k.PROC_NULL:
        if status is not None:
            status._fill(Completion(0, k.ANY_TAG, 0, 0), k.PROC_NULL)
        return -1
    peers = members.peers
    if source != k.ANY_SOURCE and not 0 <= source < len(peers):
        raise failure("ERR_RANK", f"probing for rank {source} of {len(peers)}")
    found = link().probe(flags, members.number, source if source < 0 else peers[source], tag)
    if found is None:
        return None
    completion, number = found
    if status is not None:
        status._fill(completion, members.of_world[completion.source])
    return number


class Message(Handle):
    """A message that a matched probe has taken: only this object can receive it."""

    __slots__ = ()

    @classmethod
    def Probe(cls, comm: Any, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG, status: Status | None = None) -> Self:
        number = probe(comm._members, source, tag, status, CallFlag.BLOCKING | CallFlag.MATCHED)
        assert number is not None
        return cls(MESSAGE_NO_PROC) if number < 0 else cls._wrap(_Taken(comm._members, number))

    @classmethod
    def Iprobe(
        cls, comm: Any, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG, status: Status | None = None
    ) -> Self | None:
        number = probe(comm._members, source, tag, status, CallFlag.MATCHED)
        if number is None:
            return None
        return cls(MESSAGE_NO_PROC) if number < 0 else cls._wrap(_Taken(comm._members, number))

    probe = Probe
    iprobe = Iprobe

    def _is_from_nobody(self) -> bool:
        """Whether there is nothing to receive; the message is then null, but the constant stays what it is."""
        if self != MESSAGE_NO_PROC:
            return False
        if self is not MESSAGE_NO_PROC:
            self._h = None
        return True

    def _start(self, landing: Landing, flags: int) -> tuple[Members, int | Completion]:
        if self._h is None:
            raise failure("ERR_REQUEST", "receiving a message that is null or has been received")
        taken: _Taken = self._h
        self._h = None
        assert taken.members is not None
        return taken.members, link().receive_message(flags, taken.number, landing)

    def _receive(self, landing: Landing, status: Status | None) -> bool:
        """Receive now; False if it comes from nobody."""
        if self._is_from_nobody():
            if status is not None:
                status._fill(Completion(0, k.ANY_TAG, 0, 0), k.PROC_NULL)
            return False
        members, ended = self._start(landing, CallFlag.BLOCKING)
        assert isinstance(ended, Completion)
        if status is not None:
            status._fill(ended, members.of_world[ended.source])
        if ended.error:
            raise numbered_failure(ended.error, f"a message of {ended.num_bytes} bytes: room for {landing.capacity}")
        return True

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        self._receive(parse_for(k.PROC_NULL if self == MESSAGE_NO_PROC else 0, buf).landing(), status)

    def Irecv(self, buf: Any) -> Request:
        if self._is_from_nobody():
            return Request._wrap(Work([], source=k.PROC_NULL))
        landing = parse(buf).landing()
        members, started = self._start(landing, 0)
        return Request._wrap(Work([Operation(started, landing, landing)], ranks=members.of_world))

    def recv(self, status: Status | None = None) -> Any:
        parcel = Parcel()
        return loads(parcel.data) if self._receive(parcel, status) else None

    def irecv(self) -> Request:
        if self._is_from_nobody():
            return Request._wrap(Work([], source=k.PROC_NULL))
        parcel = Parcel()
        members, started = self._start(parcel, 0)
        operation = Operation(started, parcel, parcel)
        return Request._wrap(Work([operation], ranks=members.of_world, finish=lambda: loads(parcel.data)))


MESSAGE_NULL = Message()
MESSAGE_NO_PROC = Message._wrap(_Taken(None, -1))
