"""Collectives on the real MPI, and the real communicators they need.

A virtual communicator is a number and a list of world ranks. Its real counterpart is made at its first collective.
Making it blocks on the other members, and a rank that blocks cannot answer a checkpoint. So each member says that it
has come, and only when all have are they told to make it, by world rank 0, in the same order everywhere:

    member    JOIN ──>  rank 0, when the last one has joined
    member    <── GO    makes it; every other member is about to do the same

After a restart nobody is asked anything yet, so those that had been used are made at once (``replay.py``).
Small ones are the engine's: messages of ours (``exchange_pattern.py``), or the real MPI's on short data. The others are
the real MPI's non-blocking ones, polled. ``entered`` counts all for the collective clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from remesh.mpi.calls.table import EAGER_BYTES, REAL_OPS, REAL_TYPES, REDUCTIONS, Kind
from remesh.mpi.calls.wire_messages import What
from remesh.mpi.lower.exchange_pattern import pack_plan
from remesh.mpi.lower.replay import Named, choose_common, tell_all
from remesh.mpi.lower.requests import COLLECTIVE, Requests
from remesh.mpi.lower.upper_memory import UpperMemory
from remesh.mpi.lower.wire import Wire

WORLD = 0
"""Virtual number of the world communicator; its real one exists from the start."""
_NUM_TAGS = 30_000
_MOST_FREED = 64
"""More than any rank is ahead of another: the first collective of a communicator waits for all its members."""
_ARBITER = 0
"""World rank that says when a communicator is made: one for all, so that no two ranks make two in different order."""


Result = bytearray | memoryview
"""A view is of a large buffer that is lent, or of the program's own."""


@dataclass(slots=True)
class CollectiveCall:
    """One collective, as the upper half asks for it; data are contiguous, in order of ranks."""

    kind: Kind
    root: int  # rank in the communicator
    op: int  # index into REAL_OPS
    type: int  # index into REAL_TYPES
    send: bytes | bytearray | memoryview
    receive_bytes: int  # what comes back; 0 where nothing does
    send_counts: Sequence[int] = ()  # bytes for each rank; elements for REDUCE_SCATTER
    receive_counts: Sequence[int] = ()  # bytes from each rank


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Tells communicators of one number apart: a constructor may give disjoint groups one each."""

    first: int  # world rank of its rank 0
    num_members: int


@dataclass(slots=True)
class _Communicator:
    members: tuple[int, ...]
    real: Any = None
    joined: bool = False  # this rank waits for the others, to make the real one
    waiting: deque[tuple[Any, CollectiveCall]] = field(default_factory=deque)  # entered, until the real one is there


class Collectives:
    """Communicators and collectives of a rank. ``control`` is a real communicator of all ranks for making others."""

    def __init__(self, mpi: Any, control: Any, world: Any, requests: Requests, wire: Wire, memory: UpperMemory) -> None:
        self._mpi, self._control, self._requests, self._wire, self._memory = mpi, control, requests, wire, memory
        self.mpi_error: type[Exception] = mpi.Exception
        self._ops = [getattr(mpi, name) for name in REAL_OPS]
        self._types = [getattr(mpi, name) for name in REAL_TYPES]
        self.extents = tuple(map(_extent, REAL_TYPES, self._types))
        """Bytes of a value of each basic datatype; 0 where values have gaps."""
        size = control.Get_size()
        self._communicators = {WORLD: _Communicator(tuple(range(size)), real=world)}
        self.plans: dict[int, bytes] = {WORLD: pack_plan(range(size), wire.rank)}
        """Steps of this rank's small collectives, by communicator."""
        self.entered: dict[int, int] = {}
        self.freed: dict[int, int] = {}
        """What was entered on the communicators that were freed last: other members may still be behind that."""
        self.reals: dict[int, tuple[int, int, int]] = {}
        """Handle, own rank and size of the real communicators that can be used at once: for the engine."""
        self._know(WORLD, world)
        self._running: list[tuple[Any, Any, tuple[CollectiveCall, Result, _Real]]] = []
        self._making: set[int] = set()
        self._joined: dict[tuple[int, GroupKey], list[int]] = {}
        """On rank 0: who has joined, by communicator, until all have."""

    @property
    def members(self) -> dict[int, tuple[int, ...]]:
        """World ranks of every communicator, in its order of ranks."""
        return {number: comm.members for number, comm in self._communicators.items()}

    def _know(self, number: int, real: Any) -> None:
        self.reals[number] = (self._mpi._handleof(real), real.Get_rank(), real.Get_size())

    def add(self, number: int, members: Sequence[int]) -> None:
        """Know a communicator from now on."""
        if number not in self._communicators:
            self._communicators[number] = _Communicator(tuple(members))
            self.plans[number] = pack_plan(members, self._wire.rank)
        self.freed.pop(number, None)

    def remove(self, number: int) -> None:
        """The upper half has freed it; its collectives are complete."""
        comm = self._communicators.pop(number, None)
        if count := self.entered.pop(number, 0):
            self.freed[number] = count
            if len(self.freed) > _MOST_FREED:
                del self.freed[next(iter(self.freed))]
        self.reals.pop(number, None)
        self.plans.pop(number, None)
        if comm is not None and comm.real is not None:
            # Collective by the standard's word, yet no library waits for the other members here.
            comm.real.Free()

    def start(self, number: int, job: CollectiveCall, address: int) -> Any:
        """Enter a collective; the request completes with what this rank gets as its payload."""
        comm = self._communicators[number]
        self.entered[number] = self.entered.get(number, 0) + 1
        request = self._requests.start(
            kind=COLLECTIVE, comm=number, peer=job.root, tag=0, address=address, num_bytes=job.receive_bytes
        )
        if comm.real is not None and not comm.waiting:
            try:
                self._run(comm.real, request, job)
            except self.mpi_error:
                self._requests.forget(request)
                raise
        else:
            comm.waiting.append((request, job))
            self._make(number, comm)
        return request

    def _make(self, number: int, comm: _Communicator) -> None:
        if not comm.joined:
            comm.joined = True
            self._making.add(number)
            self._say(_ARBITER, What.JOIN, number, GroupKey(comm.members[0], len(comm.members)))

    def _say(self, dest: int, what: int, number: int, group: GroupKey) -> None:
        if dest == self._wire.rank:
            self.on_making(dest, what, number, group)
        else:
            self._wire.send(dest, (number, 0, what, group.first, group.num_members, 0, 0))

    def on_making(self, source: int, what: int, number: int, group: GroupKey) -> None:
        """A rank has joined, or all have and this one is told."""
        if what == What.GO:
            self._create(number)
            return
        joined = self._joined.setdefault((number, group), [])
        joined.append(source)
        if len(joined) == group.num_members:
            del self._joined[number, group]
            # Its own turn comes last: it would keep the others from hearing of theirs.
            for member in sorted(joined, reverse=True):
                self._say(member, What.GO, number, group)

    def _create(self, number: int) -> None:
        comm = self._communicators[number]
        group = self._control.Get_group().Incl(list(comm.members))
        comm.real = self._control.Create_group(group, number % _NUM_TAGS)
        group.Free()
        self._making.discard(number)
        while comm.waiting:
            self._run(comm.real, *comm.waiting.popleft())
        self._know(number, comm.real)

    def replay(self) -> None:
        """Make the real ones of all communicators that have been used, on another library. All ranks call this."""
        named = [
            Named(number, comm.members[0], len(comm.members))
            for number, comm in self._communicators.items()
            if comm.real is None and self.entered.get(number)
        ]
        for each in choose_common(named, tell_all(self._mpi, self._control, named)):
            self._create(each.number)

    def _run(self, real: Any, request: Any, job: CollectiveCall) -> None:
        result = self._room(request.address, job.receive_bytes)
        words = self._as_real(job, result)
        started = _START[job.kind](words, real)
        if started.Test():
            self._finish(request, job, result)
        else:
            self._running.append((started, request, (job, result, words)))

    def _room(self, address: int, num_bytes: int) -> Result:
        """Where the real MPI puts a result that belongs to this address: there, if it is shared with us."""
        if num_bytes <= EAGER_BYTES:
            return bytearray(num_bytes)
        place = self._memory.view(address, num_bytes)
        return self._memory.large.lend(num_bytes) if place is None else place

    def _as_real(self, job: CollectiveCall, result: Result) -> _Real:
        mpi = self._mpi
        if job.kind in REDUCTIONS:
            datatype = self._types[job.type]
            return _Real(job, [job.send, datatype], [result, datatype], self._ops[job.op])
        return _Real(job, [job.send, mpi.BYTE], [result, mpi.BYTE], None)

    def _finish(self, request: Any, job: CollectiveCall, result: Result) -> None:
        request.message_bytes = len(result)
        if isinstance(result, bytearray):
            request.payload = result
        else:
            if self._memory.view(request.address, len(result)) is None:
                self._memory.write(request.address, result)
            request.written = True
        for lent in (job.send, result):
            self._memory.large.take_back(lent)
        self._requests.complete(request)

    def poll(self) -> bool:
        """Look after what is running; whether something has completed."""
        if not self._running:
            return False
        still = []
        for entry in self._running:
            started, request, (job, result, _) = entry
            if started.Test():
                self._finish(request, job, result)
            else:
                still.append(entry)
        progressed = len(still) != len(self._running)
        self._running = still
        return progressed

    def watched(self) -> list[int]:
        """Where the handles stand of the real requests that run."""
        return [self._wire.address_of(started) for started, *_ in self._running]

    @property
    def inside(self) -> tuple[int, ...]:
        """Communicators with a collective that has been entered and is not complete."""
        return tuple({request.comm for _, request, _ in self._running} | self._making)

    def release(self) -> None:
        """Forget the real communicators: they end with the library."""
        self.reals.clear()
        for comm in self._communicators.values():
            comm.real = None


@dataclass(slots=True)
class _Real:
    """A job in the words of mpi4py."""

    job: CollectiveCall
    send: list[Any]
    receive: list[Any]
    op: Any

    def of(self, buffer: list[Any], counts: Sequence[int]) -> list[Any]:
        return [buffer[0], list(counts), None, buffer[1]]


def _extent(name: str, datatype: Any) -> int:
    # Values with an index have gaps, which differ from MPI to MPI.
    is_plain = datatype.extent == datatype.size and not name.endswith("_INT")
    return int(datatype.extent) if is_plain else 0


def _bcast(real: _Real, comm: Any) -> Any:
    is_root = comm.Get_rank() == real.job.root
    return comm.Ibcast(real.send if is_root else real.receive, real.job.root)


def _at_root(real: _Real, comm: Any, buffer: Any) -> Any:
    return buffer if comm.Get_rank() == real.job.root else None


_START: dict[Kind, Callable[[_Real, Any], Any]] = {
    Kind.BARRIER: lambda r, c: c.Ibarrier(),
    Kind.BCAST: _bcast,
    Kind.GATHER: lambda r, c: c.Igather(r.send, _at_root(r, c, r.receive), r.job.root),
    Kind.GATHERV: lambda r, c: c.Igatherv(r.send, _at_root(r, c, r.of(r.receive, r.job.receive_counts)), r.job.root),
    Kind.SCATTER: lambda r, c: c.Iscatter(_at_root(r, c, r.send), r.receive, r.job.root),
    Kind.SCATTERV: lambda r, c: c.Iscatterv(_at_root(r, c, r.of(r.send, r.job.send_counts)), r.receive, r.job.root),
    Kind.ALLGATHER: lambda r, c: c.Iallgather(r.send, r.receive),
    Kind.ALLGATHERV: lambda r, c: c.Iallgatherv(r.send, r.of(r.receive, r.job.receive_counts)),
    Kind.ALLTOALL: lambda r, c: c.Ialltoall(r.send, r.receive),
    Kind.ALLTOALLV: lambda r, c: c.Ialltoallv(r.of(r.send, r.job.send_counts), r.of(r.receive, r.job.receive_counts)),
    Kind.REDUCE: lambda r, c: c.Ireduce(r.send, _at_root(r, c, r.receive), r.op, r.job.root),
    Kind.ALLREDUCE: lambda r, c: c.Iallreduce(r.send, r.receive, r.op),
    Kind.REDUCE_SCATTER: lambda r, c: c.Ireduce_scatter(r.send, r.receive, list(r.job.send_counts), r.op),
    Kind.SCAN: lambda r, c: c.Iscan(r.send, r.receive, r.op),
    Kind.EXSCAN: lambda r, c: c.Iexscan(r.send, r.receive, r.op),
}
