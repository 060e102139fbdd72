"""The lower-case methods: Python objects as messages, by pickle.

Collectives of objects are collectives of bytes whose sizes go ahead of them.
"""

from __future__ import annotations

import functools
import struct
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from remesh.mpi.calls.table import CallFlag, Kind
from remesh.mpi.upper import constants as k
from remesh.mpi.upper.buffers import NOTHING, Direct, Parcel
from remesh.mpi.upper.collective import is_root
from remesh.mpi.upper.exchange import Exchange, cut
from remesh.mpi.upper.exchange import run_now as run
from remesh.mpi.upper.membership import Members
from remesh.mpi.upper.message import Message
from remesh.mpi.upper.op import OPS
from remesh.mpi.upper.pickles import dumps, loads
from remesh.mpi.upper.point_to_point import (
    receive_now,
    send_buffered,
    send_now,
    start_receive,
    start_send,
)
from remesh.mpi.upper.request import Request
from remesh.mpi.upper.status import Status

_SIZE = struct.Struct("<q")
_HEAD_BYTES = 1024
"""What goes with the size of a broadcast object: most objects fit and need no second round."""
_SUM = OPS["SUM"]


def _land(num_bytes: int) -> tuple[bytearray, Direct]:
    whole = bytearray(num_bytes)
    return whole, Direct(memoryview(whole))


def _sizes(data: Sequence[memoryview]) -> memoryview:
    return memoryview(struct.pack(f"<{len(data)}q", *map(len, data)))


def _read_sizes(data: bytearray) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // _SIZE.size}q", data)


_Collective = TypeVar("_Collective", bound=Callable[..., Any])


def _in_turn(collective: _Collective) -> _Collective:
    """Threads that share a communicator take turns in each of its collectives, which are of several steps."""
    name = collective.__name__

    @functools.wraps(collective)
    def alone(members: Members, *args: Any) -> Any:
        with members.locks.get(name) or members.locks.setdefault(name, threading.Lock()):
            return collective(members, *args)

    return cast(_Collective, alone)


@_in_turn
def bcast(members: Members, obj: Any, root: int) -> Any:
    """Give the root's object to all."""
    if is_root(members, root):
        data = dumps(obj)
        head = memoryview(_SIZE.pack(len(data)) + data[: _HEAD_BYTES - _SIZE.size]).tobytes().ljust(_HEAD_BYTES, b"\0")
        run(members, Exchange(Kind.BCAST, memoryview(head), root=root))
        if len(data) > _HEAD_BYTES - _SIZE.size:
            run(members, Exchange(Kind.BCAST, data, root=root))
        return None if root == k.ROOT else obj
    if root == k.PROC_NULL:
        return None
    first, landing = _land(_HEAD_BYTES)
    run(members, Exchange(Kind.BCAST, landing=landing, root=root))
    (size,) = _SIZE.unpack_from(first)
    if size <= _HEAD_BYTES - _SIZE.size:
        return loads(first[_SIZE.size : _SIZE.size + size])
    whole, landing = _land(size)
    run(members, Exchange(Kind.BCAST, landing=landing, root=root))
    return loads(whole)


@_in_turn
def gather(members: Members, obj: Any, root: int) -> list[Any] | None:
    """All objects, at the root."""
    if not is_root(members, root):
        if root != k.PROC_NULL:
            data = dumps(obj)
            run(members, Exchange(Kind.GATHER, _sizes([data]), root=root))
            run(members, Exchange(Kind.GATHERV, data, root=root))
        return None
    data = dumps(obj) if members.remote is None else memoryview(b"")
    own = _sizes([data]) if members.remote is None else memoryview(b"")
    packed, landing = _land(_SIZE.size * len(members.peers))
    run(members, Exchange(Kind.GATHER, own, landing, root))
    sizes = _read_sizes(packed)
    whole, landing = _land(sum(sizes))
    run(members, Exchange(Kind.GATHERV, data, landing, root, receive_counts=sizes))
    return [loads(block) for block in cut(memoryview(whole), sizes)]


@_in_turn
def scatter(members: Members, objects: Sequence[Any] | None, root: int) -> Any:
    """One of the root's objects for each."""
    if root == k.PROC_NULL:
        return None
    num = len(members.peers)
    sizes = memoryview(b"")
    data: list[memoryview] = []
    at_root = is_root(members, root)
    if at_root:
        given = [None] * num if objects is None else list(objects)
        if len(given) != num:
            raise ValueError(f"expecting {num} items, got {len(given)}")
        data = [dumps(one) for one in given]
        sizes = _sizes(data)
    takes = not at_root or members.remote is None
    packed, landing = _land(_SIZE.size) if takes else (bytearray(_SIZE.size), NOTHING)
    run(members, Exchange(Kind.SCATTER, sizes, landing, root))
    (size,) = _SIZE.unpack(packed)
    whole, landing = _land(size) if takes else (bytearray(), NOTHING)
    counts = tuple(map(len, data))
    run(members, Exchange(Kind.SCATTERV, memoryview(b"".join(data)), landing, root, send_counts=counts))
    return loads(whole) if takes else None


@_in_turn
def allgather(members: Members, obj: Any) -> list[Any]:
    """All objects, everywhere."""
    data = dumps(obj)
    packed, landing = _land(_SIZE.size * len(members.peers))
    run(members, Exchange(Kind.ALLGATHER, _sizes([data]), landing))
    sizes = _read_sizes(packed)
    whole, landing = _land(sum(sizes))
    run(members, Exchange(Kind.ALLGATHERV, data, landing, receive_counts=sizes))
    return [loads(block) for block in cut(memoryview(whole), sizes)]


@_in_turn
def alltoall(members: Members, objects: Sequence[Any] | None) -> list[Any]:
    """One of everybody's objects for each."""
    num = len(members.peers)
    given = [None] * num if objects is None else list(objects)
    if len(given) != num:
        raise ValueError(f"expecting {num} items, got {len(given)}")
    data = [dumps(one) for one in given]
    packed, landing = _land(_SIZE.size * num)
    run(members, Exchange(Kind.ALLTOALL, _sizes(data), landing))
    sizes = _read_sizes(packed)
    whole, landing = _land(sum(sizes))
    counts = tuple(map(len, data))
    send = memoryview(b"".join(data))
    run(members, Exchange(Kind.ALLTOALLV, send, landing, send_counts=counts, receive_counts=sizes))
    return [loads(block) for block in cut(memoryview(whole), sizes)]


class Objects:
    """Mixin of Comm: everything with Python objects."""

    __slots__ = ()

    _members: Members

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        send_now(self._members, _data(obj, dest), dest, tag, 0)

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        send_buffered(self._members, _data(obj, dest), dest, tag)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        send_now(self._members, _data(obj, dest), dest, tag, CallFlag.SYNCHRONOUS)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        return Request._wrap(start_send(self._members, _data(obj, dest), dest, tag))

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        return Request._wrap(send_buffered(self._members, _data(obj, dest), dest, tag))

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        return Request._wrap(start_send(self._members, _data(obj, dest), dest, tag, CallFlag.SYNCHRONOUS))

    def recv(
        self, buf: Any = None, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG, status: Status | None = None
    ) -> Any:
        _warn_of(buf)
        parcel = Parcel()
        receive_now(self._members, parcel, source, tag, status)
        return loads(parcel.data) if source != k.PROC_NULL else None

    def irecv(self, buf: Any = None, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG) -> Request:
        _warn_of(buf)
        parcel = Parcel()
        nobody = source == k.PROC_NULL
        finish: Callable[[], Any] = lambda: None if nobody else loads(parcel.data)  # noqa: E731
        return Request._wrap(start_receive(self._members, parcel, source, tag, finish))

    def sendrecv(  # noqa: PLR0913 - mpi4py's arguments
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = k.ANY_SOURCE,
        recvtag: int = k.ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        sending = self.isend(sendobj, dest, sendtag)
        received = self.recv(recvbuf, source, recvtag, status)
        sending.Wait()
        return received

    def probe(self, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG, status: Status | None = None) -> bool:
        return bool(self.Probe(source, tag, status))  # type: ignore[attr-defined]  # of the other mixin

    def iprobe(self, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG, status: Status | None = None) -> bool:
        return bool(self.Iprobe(source, tag, status))  # type: ignore[attr-defined]  # of the other mixin

    def mprobe(self, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG, status: Status | None = None) -> Message:
        return Message.Probe(self, source, tag, status)

    def improbe(self, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG, status: Status | None = None) -> Message | None:
        return Message.Iprobe(self, source, tag, status)

    def barrier(self) -> None:
        run(self._members, Exchange(Kind.BARRIER))

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return bcast(self._members, obj, root)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        return gather(self._members, sendobj, root)

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        return scatter(self._members, sendobj, root)

    def allgather(self, sendobj: Any) -> list[Any]:
        return allgather(self._members, sendobj)

    def alltoall(self, sendobj: Sequence[Any] | None) -> list[Any]:
        return alltoall(self._members, sendobj)

    def reduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = _SUM, root: int = 0) -> Any:
        objects = gather(self._members, sendobj, root)
        return None if objects is None else _fold(op, objects)

    def allreduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = _SUM) -> Any:
        return _fold(op, allgather(self._members, sendobj))

    def scan(self, sendobj: Any, op: Callable[[Any, Any], Any] = _SUM) -> Any:
        return _fold(op, allgather(self._members, sendobj)[: self._members.rank + 1])

    def exscan(self, sendobj: Any, op: Callable[[Any, Any], Any] = _SUM) -> Any:
        before = allgather(self._members, sendobj)[: self._members.rank]
        return _fold(op, before) if before else None


def _warn_of(buf: Any) -> None:
    if buf is not None:
        warnings.warn("the 'buf' argument is deprecated", UserWarning, stacklevel=3)


def _data(obj: Any, dest: int) -> memoryview:
    return memoryview(b"") if dest == k.PROC_NULL else dumps(obj)


def _fold(op: Callable[[Any, Any], Any], objects: Sequence[Any]) -> Any:
    """In the order of ranks. MINLOC and MAXLOC take (value, index) pairs."""
    return functools.reduce(op, objects)
