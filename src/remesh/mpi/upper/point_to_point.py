"""Sending and receiving buffers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from remesh.mpi.calls.table import CallFlag
from remesh.mpi.upper import constants as k
from remesh.mpi.upper.buffers import Spec, parse_for
from remesh.mpi.upper.exceptions import failure, numbered_failure
from remesh.mpi.upper.link import Completion, Landing, call_shortly, link, port, start_shortly
from remesh.mpi.upper.membership import Members
from remesh.mpi.upper.memory import attached
from remesh.mpi.upper.message import Message, probe
from remesh.mpi.upper.request import Operation, Prequest, Request, Work, progress
from remesh.mpi.upper.status import Status

_buffered: list[Work] = []
"""Long buffered sends that no receive has matched yet; their copies live here."""


def destination(members: Members, dest: int, tag: int) -> int | None:
    """World rank to send to; None is nobody."""
    if dest == k.PROC_NULL:
        return None
    if not tag >= 0:
        raise failure("ERR_TAG", f"sending with tag {tag}, expected one from 0 on")
    peers = members.peers
    if not 0 <= dest < len(peers):
        raise failure("ERR_RANK", f"sending to rank {dest} of {len(peers)}")
    return peers[dest]


def origin(members: Members, source: int, tag: int) -> int | None:
    """World rank to receive from, or ANY; None is nobody."""
    if source == k.PROC_NULL:
        return None
    if tag < k.ANY_TAG:
        raise failure("ERR_TAG", f"receiving with tag {tag}, expected ANY_TAG or one from 0 on")
    if source == k.ANY_SOURCE:
        return k.ANY_SOURCE
    peers = members.peers
    if not 0 <= source < len(peers):
        raise failure("ERR_RANK", f"receiving from rank {source} of {len(peers)}")
    return peers[source]


def send_now(members: Members, view: memoryview, dest: int, tag: int, flags: int) -> None:
    """A blocking send of contiguous bytes."""
    world = destination(members, dest, tag)
    if world is not None:
        link().send(flags | CallFlag.BLOCKING, members.number, world, tag, view)


def start_send(members: Members, view: memoryview, dest: int, tag: int, flags: int = 0) -> Work:
    """A send of contiguous bytes under way."""
    world = destination(members, dest, tag)
    if world is None:
        return Work([])
    return Work([Operation(link().send(flags, members.number, world, tag, view), None, view)])


def send_buffered(members: Members, view: memoryview, dest: int, tag: int) -> Work:
    """A send that is over for the program at once: of a copy."""
    _buffered[:] = [work for work in _buffered if not _is_over(work)]
    work = start_send(members, memoryview(bytes(view)), dest, tag)
    if not work.is_over:
        _buffered.append(work)
    return Work([])


def _is_over(work: Work) -> bool:
    progress([work], blocking=False, every=True)
    return work.is_over


def wait_for_buffered() -> None:
    """Until all buffered sends have been taken."""
    progress(_buffered, blocking=True, every=True)
    _buffered.clear()


def receive_now(members: Members, landing: Landing, source: int, tag: int, status: Status | None) -> None:
    """A blocking receive."""
    world = origin(members, source, tag)
    if world is None:
        _tell_nobody(status)
        return
    ended = link().receive(CallFlag.BLOCKING, members.number, world, tag, landing)
    assert isinstance(ended, Completion)
    _conclude(members, ended, status)


def _conclude(members: Members, ended: Completion, status: Status | None) -> None:
    if status is not None:
        status._fill(ended, members.of_world[ended.source])
    if ended.error:
        raise numbered_failure(ended.error, f"a message of {ended.num_bytes} bytes is longer than its buffer")


def start_receive(
    members: Members, landing: Landing, source: int, tag: int, finish: Callable[[], Any] | None = None
) -> Work:
    """A receive under way."""
    world = origin(members, source, tag)
    if world is None:
        return Work([], source=k.PROC_NULL)
    started = link().receive(0, members.number, world, tag, landing)
    return Work([Operation(started, landing, landing)], ranks=members.of_world, finish=finish)


def _tell_nobody(status: Status | None) -> None:
    if status is not None:
        status._fill(Completion(0, k.ANY_TAG, 0, 0), k.PROC_NULL)


class _Partitions(Work):
    """A partitioned send under way: sent when all partitions are ready."""

    def __init__(self, num: int, send: Callable[[], Work]) -> None:
        super().__init__([])
        self._missing = set(range(num))
        self._send = send
        self._sent = False

    def ready(self, partitions: Iterable[int]) -> None:
        """The program has filled these partitions."""
        self._missing -= set(partitions)
        if not self._missing and not self._sent:
            self._sent = True
            self.operations = self._send().operations

    @property
    def is_over(self) -> bool:
        return self._sent and super().is_over

    def wait_elsewhere(self, timeout_s: float) -> None:
        time.sleep(timeout_s)


class WithBuffer:
    """Mixin for handles with memory for buffered sends: not needed, kept for programs that ask for it back."""

    __slots__ = ()
    _content: Any

    def Attach_buffer(self, buf: Any) -> None:
        self._content.buffer = attached(buf)

    def Detach_buffer(self) -> Any:
        self.Flush_buffer()
        buffer, self._content.buffer = self._content.buffer, None
        return buffer

    def Flush_buffer(self) -> None:
        _ = self._content
        wait_for_buffered()

    def Iflush_buffer(self) -> Request:
        self.Flush_buffer()
        return Request._wrap(Work([]))


class PointToPoint(WithBuffer):
    """Mixin of Comm: everything with one peer."""

    __slots__ = ()

    _members: Members

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        members = self._members
        if not port().send(members.number, members.peers, buf, dest, tag):
            send_now(members, parse_for(dest, buf).payload(), dest, tag, 0)

    Rsend = Send

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        send_now(self._members, parse_for(dest, buf).payload(), dest, tag, CallFlag.SYNCHRONOUS)

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        send_buffered(self._members, parse_for(dest, buf).payload(), dest, tag)

    def Recv(self, buf: Any, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG, status: Status | None = None) -> None:
        members = self._members
        ended = call_shortly(port().receive, members.number, members.peers, buf, source, tag)
        if ended is None:
            receive_now(members, parse_for(source, buf).landing(), source, tag, status)
        elif status is not None or ended[3]:
            _conclude(members, Completion(*ended), status)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        members = self._members
        if port().send(members.number, members.peers, buf, dest, tag):
            return Request._wrap(Work([]))
        return Request._wrap(start_send(members, parse_for(dest, buf).payload(), dest, tag))

    Irsend = Isend

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        return Request._wrap(start_send(self._members, parse_for(dest, buf).payload(), dest, tag, CallFlag.SYNCHRONOUS))

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        return Request._wrap(send_buffered(self._members, parse_for(dest, buf).payload(), dest, tag))

    def Irecv(self, buf: Any, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG) -> Request:
        members = self._members
        started = start_shortly(members.number, members.peers, buf, source, tag)
        if started is not None:
            return Request._wrap(Work([Operation(*started)], ranks=members.of_world))
        return Request._wrap(start_receive(members, parse_for(source, buf).landing(), source, tag))

    # Persistent.

    def _send_init(self, buf: Any, dest: int, tag: int, start: Callable[..., Work]) -> Prequest:
        members, spec = self._members, parse_for(dest, buf)
        destination(members, dest, tag)
        return Prequest._of(lambda: start(members, spec.payload(), dest, tag))

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        return self._send_init(buf, dest, tag, start_send)

    Rsend_init = Send_init

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        return self._send_init(buf, dest, tag, send_buffered)

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        def start(members: Members, view: memoryview, dest: int, tag: int) -> Work:
            return start_send(members, view, dest, tag, CallFlag.SYNCHRONOUS)

        return self._send_init(buf, dest, tag, start)

    def Recv_init(self, buf: Any, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG) -> Prequest:
        members, spec = self._members, parse_for(source, buf)
        origin(members, source, tag)
        return Prequest._of(lambda: start_receive(members, spec.landing(), source, tag))

    def Psend_init(self, buf: Any, partitions: int, dest: int, tag: int = 0, info: Any = None) -> Prequest:
        members, spec = self._members, parse_for(dest, buf, partitions)
        return Prequest._of(lambda: _Partitions(partitions, lambda: start_send(members, spec.payload(), dest, tag)))

    def Precv_init(
        self, buf: Any, partitions: int, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG, info: Any = None
    ) -> Prequest:
        members, spec = self._members, parse_for(source, buf, partitions)
        return Prequest._of(lambda: start_receive(members, spec.landing(), source, tag))

    # Both ways.

    def Sendrecv(  # noqa: PLR0913 - mpi4py's arguments
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = k.ANY_SOURCE,
        recvtag: int = k.ANY_TAG,
        status: Status | None = None,
    ) -> None:
        members = self._members
        fields = (members.number, members.peers, sendbuf, dest, sendtag, recvbuf, source, recvtag)
        ended = call_shortly(port().exchange, *fields)
        if ended is None:
            self.Isendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag)._finish_receive(status)
        elif status is not None or ended[3]:
            _conclude(members, Completion(*ended), status)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = k.ANY_SOURCE,
        recvtag: int = k.ANY_TAG,
        status: Status | None = None,
    ) -> None:
        self.Isendrecv_replace(buf, dest, sendtag, source, recvtag)._finish_receive(status)

    def Isendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = k.ANY_SOURCE,
        recvtag: int = k.ANY_TAG,
    ) -> BothWays:
        payload = parse_for(dest, sendbuf).payload()
        return self._both_ways(payload, dest, sendtag, parse_for(source, recvbuf), (source, recvtag))

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = k.ANY_SOURCE, recvtag: int = k.ANY_TAG
    ) -> BothWays:
        spec = parse_for(source if dest == k.PROC_NULL else dest, buf)
        return self._both_ways(memoryview(bytes(spec.payload())), dest, sendtag, spec, (source, recvtag))

    def _both_ways(self, payload: memoryview, dest: int, tag: int, into: Spec, wanted: tuple[int, int]) -> BothWays:
        members = self._members
        receive = start_receive(members, into.landing(), *wanted)
        send = start_send(members, payload, dest, tag)
        return BothWays._wrap(_Pair(receive, send))

    # Probes.

    def Probe(self, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG, status: Status | None = None) -> bool:
        probe(self._members, source, tag, status, CallFlag.BLOCKING)
        return True

    def Iprobe(self, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG, status: Status | None = None) -> bool:
        return probe(self._members, source, tag, status, 0) is not None

    def Mprobe(self, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG, status: Status | None = None) -> Message:
        return Message.Probe(self, source, tag, status)

    def Improbe(self, source: int = k.ANY_SOURCE, tag: int = k.ANY_TAG, status: Status | None = None) -> Message | None:
        return Message.Iprobe(self, source, tag, status)


class _Pair(Work):
    """A receive and a send; the status is the receive's."""

    def __init__(self, receive: Work, send: Work) -> None:
        super().__init__([*receive.operations, *send.operations])
        self._receive = receive

    def fill(self, status: Status | None) -> None:
        self._receive.fill(status)


class BothWays(Request):
    """The request of a combined send and receive."""

    __slots__ = ()

    def _finish_receive(self, status: Status | None) -> None:
        self.Wait(status)
