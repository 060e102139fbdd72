"""Collectives on the real MPI, and the real communicators they need.

A virtual communicator is a number and a list of world ranks. Its real counterpart is made at its first collective.
Making it blocks on the other members, and a rank that blocks cannot answer a checkpoint. So each member says that it
has come, and only when all have are they told to make it, by world rank 0, in the same order everywhere:

    member    JOIN ──>  rank 0, when the last one has joined
    member    <── GO    makes it; every other member is about to do the same

After a restart nobody is asked anything yet, so those that had been used are made at once (``replay.py``).
Small ones are the engine's: messages of ours (``exchange_pattern.py``), or the real MPI's on short data. The others are
the real MPI's non-blocking ones, polled. ``entered`` counts all, so each has a number on its communicator.

One rule makes a cut wait for nobody: *what is complete on one member has been entered by all*. Then it ends on all by
itself, which needs no program; and what some member has not entered is complete on none, has changed nothing but room
for results, and is begun anew by the next lower half, in order (`reopen`). Where every member needs data of every other
one MPI itself keeps that rule. What may end earlier on some member (`may_end_early`) is a message of ours if it is
small; else it first waits at a *gate*, a barrier of the real MPI, and what was entered behind it waits with it: members
must begin all in one order. What is open behind a gate has begun nowhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from remesh.carried.mpi.calls.error_classes import CLASSES
from remesh.carried.mpi.calls.table import EAGER_BYTES, REAL_OPS, REAL_TYPES, REDUCTIONS, Kind
from remesh.carried.mpi.calls.wire_messages import What
from remesh.carried.mpi.lower.exchange_pattern import pack_plan, plan_small
from remesh.carried.mpi.lower.numbered import Numbered
from remesh.carried.mpi.lower.open_collectives import OpenCall, call_of, pack_told, shape_of, unpack_told
from remesh.carried.mpi.lower.real_collectives import CollectiveCall, RealCall, Result, extent_of, may_end_early
from remesh.carried.mpi.lower.replay import Named, choose_common, join_all, send_all
from remesh.carried.mpi.lower.requests import COLLECTIVE, Requests
from remesh.carried.mpi.lower.stand_ins import GATE, CallShape, ToldCall, plan_stand_in
from remesh.carried.mpi.lower.upper_memory import UpperMemory
from remesh.carried.mpi.lower.wire import Wire

WORLD = 0
"""Virtual number of the world communicator; its real one exists from the start."""
_NUM_TAGS = 30_000
_ARBITER = 0
"""World rank that says when a communicator is made: one for all, so that no two ranks make two in different order."""


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The key of a communicator among those of one number: a constructor may give disjoint groups one each."""

    first: int  # world rank of its rank 0
    num_members: int


@dataclass(slots=True)
class _Communicator:
    members: tuple[int, ...]
    real: Any = None
    joined: bool = False  # this rank waits for the others, to make the real one
    waiting: deque[OpenCall] = field(default_factory=deque)  # for the real one, or behind a gate
    gate: Any = None  # request of the real MPI: the first one that waits begins when all members have entered it
    plans: Numbered[bytes] = field(default_factory=Numbered)


class Collectives:
    """Communicators and collectives of a rank. ``control`` is a real communicator of all ranks for making others."""

    def __init__(self, mpi: Any, control: Any, world: Any, requests: Requests, wire: Wire, memory: UpperMemory) -> None:
        self._mpi, self._control, self._requests, self._wire, self._memory = mpi, control, requests, wire, memory
        self.mpi_error: type[Exception] = mpi.Exception
        self._ops = [getattr(mpi, name) for name in REAL_OPS]
        self._types = [getattr(mpi, name) for name in REAL_TYPES]
        self.extents = tuple(map(extent_of, REAL_TYPES, self._types))
        """Bytes of a value of each basic datatype; 0 where values have gaps."""
        size = control.Get_size()
        world_communicator = _Communicator(tuple(range(size)), real=world)
        self._communicators = {WORLD: world_communicator}
        self.plans = Numbered({WORLD: world_communicator.plans})
        """Steps of this rank's small collectives, by communicator, and then by kind << 32 | root, as asked for.
        """
        self.entered = Numbered[int]()
        self.made: set[int] = {WORLD}
        """Communicators that have had a real one, in an earlier stay too: all members have used them."""
        self.reals = Numbered[tuple[int, int]]()
        """Handle and size of the real communicators where nothing waits: for the engine."""
        self._know(WORLD, world)
        self._running: list[OpenCall] = []
        self._gated: set[int] = set()
        """Communicators whose first waiting collective is at its gate."""
        self._is_leaving = False
        self._stand_ins: list[tuple[Any, RealCall]] = []
        """Collectives that run on the real MPI so that other ranks can leave, with their buffers."""
        self._joined: dict[tuple[int, GroupKey], list[int]] = {}
        """The ranks that have joined, by communicator, until all have; on rank 0."""

    @property
    def members(self) -> dict[int, tuple[int, ...]]:
        """World ranks of every communicator, in its order of ranks."""
        return {number: comm.members for number, comm in self._communicators.items()}

    def _know(self, number: int, real: Any) -> None:
        self.reals[number] = (self._mpi._handleof(real), real.Get_size())

    def add(self, number: int, members: Sequence[int]) -> None:
        """Register a communicator."""
        if number not in self._communicators:
            self._communicators[number] = made = _Communicator(tuple(members))
            self.plans[number] = made.plans

    def make_plan(self, number: int, kind: int, root: int) -> None:
        """Add the steps of this rank in a kind of small collective; none for a root that is no rank."""
        comm = self._communicators[number]
        if 0 <= root < len(comm.members):
            steps = plan_small(Kind(kind), comm.members, comm.members.index(self._wire.rank), root)
            comm.plans[kind << 32 | root] = pack_plan(len(comm.members), steps)

    def plan_of(self, number: int, kind: int, root: int) -> bytes:
        """The plan of such a collective, made if it is not there; KeyError for a root that is no rank."""
        key = kind << 32 | root
        if key not in self._communicators[number].plans:
            self.make_plan(number, kind, root)
        return self._communicators[number].plans[key]

    def remove(self, number: int) -> None:
        """Remove a communicator that the upper half has freed; its collectives are complete."""
        comm = self._communicators.pop(number, None)
        self.made.discard(number)
        self.entered.pop(number, None)
        self.reals.pop(number, None)
        self.plans.pop(number, None)
        if comm is not None and comm.real is not None:
            # Collective by the standard's word, but no library waits for the other members here.
            comm.real.Free()

    def start(self, number: int, job: CollectiveCall, address: int) -> Any:
        """Enter a collective; the request completes with what this rank gets as its payload."""
        self.entered[number] = self.entered.get(number, 0) + 1
        request = self._requests.start(
            kind=COLLECTIVE, comm=number, peer=job.root, tag=0, address=address, num_bytes=job.receive_bytes
        )
        try:
            self._begin(OpenCall(request, self.entered[number], job))
        except self.mpi_error:
            self._requests.forget(request)
            raise
        return request

    def reopen(self, begun: Iterable[OpenCall]) -> None:
        """Begin again the collectives that an earlier lower half had left open."""
        for one in sorted(begun, key=lambda one: (one.request.comm, one.number)):
            self._begin(one)

    def _begin(self, begun: OpenCall) -> None:
        number = begun.request.comm
        comm = self._communicators[number]
        comm.waiting.append(begun)
        if comm.real is None:
            self._make(number, comm)
        else:
            self._go_on(number, comm)

    def _go_on(self, number: int, comm: _Communicator) -> bool:
        """Begin the waiting collectives that may begin, in order; returns whether there was any."""
        before = len(comm.waiting)
        while comm.waiting and self._may_begin(comm):
            comm.gate = None
            self._run(comm.real, comm.waiting.popleft())
        if comm.waiting:
            self._gated.add(number)
            self.reals.pop(number, None)
        else:
            self._gated.discard(number)
            self._know(number, comm.real)
        return len(comm.waiting) < before

    def _pass_gate(self, number: int, comm: _Communicator) -> bool:
        """Do the same for one that was entered earlier: what the real MPI refuses is an error of the request."""
        first = comm.waiting[0]
        try:
            return self._go_on(number, comm)
        except self.mpi_error:
            first.request.error = CLASSES["ERR_OTHER"]
            self._requests.complete(first.request)
            return True

    def _may_begin(self, comm: _Communicator) -> bool:
        """Whether the first collective in the queue need not wait any longer."""
        if comm.gate is None and not may_end_early(comm.waiting[0].job, len(comm.members)):
            return True
        if comm.gate is None:
            comm.gate = comm.real.Ibarrier()
        return not self._is_leaving and bool(comm.gate.Test())

    def _make(self, number: int, comm: _Communicator) -> None:
        if not comm.joined:
            comm.joined = True
            self._say(_ARBITER, What.JOIN, number, GroupKey(comm.members[0], len(comm.members)))

    def _say(self, dest: int, what: int, number: int, group: GroupKey) -> None:
        if dest == self._wire.rank:
            self.on_making(dest, what, number, group)
        else:
            self._wire.send(dest, (number, 0, what, group.first, group.num_members, 0, 0))

    def on_making(self, source: int, what: int, number: int, group: GroupKey) -> None:
        """Handle a message about a new communicator: a rank has joined, or all have and this one is told."""
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
        self.made.add(number)
        self._go_on(number, comm)

    def replay(self) -> None:
        """Make the real communicators again on another library, for all that have had one. All ranks call this."""
        named = [
            Named(number, comm.members[0], len(comm.members))
            for number, comm in self._communicators.items()
            if comm.real is None and number in self.made
        ]
        for each in choose_common(named, send_all(self._mpi, self._control, named)):
            self._create(each.number)

    def _run(self, real: Any, begun: OpenCall) -> None:
        begun.result = self._room(begun.request.address, begun.job.receive_bytes)
        begun.words = self._as_real(begun.job, begun.result)
        begun.started = begun.words.start(real)
        if not self._end(begun):
            self._running.append(begun)

    def _end(self, begun: OpenCall) -> bool:
        """Complete a collective if it is over."""
        if not begun.started.Test():
            return False
        # While the ranks leave, it has ended with data that nobody may read.
        if not self._is_leaving:
            self._finish(begun.request, begun.job, begun.result)
        return True

    def _room(self, address: int, num_bytes: int) -> Result:
        """Choose where the real MPI puts the result for this address: there, if the memory is shared with us."""
        if num_bytes <= EAGER_BYTES:
            return bytearray(num_bytes)
        place = self._memory.view(address, num_bytes)
        return self._memory.large.lend(num_bytes) if place is None else place

    def _as_real(self, job: CollectiveCall, result: Result) -> RealCall:
        mpi = self._mpi
        if job.kind in REDUCTIONS:
            datatype = self._types[job.type]
            return RealCall(job, [job.send, datatype], [result, datatype], self._ops[job.op])
        return RealCall(job, [job.send, mpi.BYTE], [result, mpi.BYTE], None)

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
        """Check all that is running; returns whether something has completed."""
        still = [begun for begun in self._running if not self._end(begun)]
        progressed = len(still) != len(self._running)
        self._running = still
        for number in list(self._gated):
            progressed |= self._pass_gate(number, self._communicators[number])
        self._stand_ins = [pair for pair in self._stand_ins if not pair[0].Test()]
        return progressed

    def stand_in(self, of_engine: Iterable[OpenCall]) -> None:
        """Take part in all that other ranks have begun, so that it ends. All ranks call this, and leave.

        ``of_engine``: what this rank's engine has begun.
        """
        self._is_leaving = True
        own = [self._tell(begun, shape_of(begun.job)) for begun in (*self._running, *of_engine)]
        own += [self._tell(self._communicators[number].waiting[0], GATE) for number in sorted(self._gated)]
        told = unpack_told(bytes(join_all(self._mpi, self._control, pack_told(own))))
        missing: dict[tuple[int, int], CallShape] = {}
        for one in told:
            comm = self._communicators.get(one.comm)
            is_ours = comm is not None and (comm.members[0], len(comm.members)) == (one.first, one.num_members)
            if is_ours and self.entered.get(one.comm, 0) < one.number:
                missing[one.comm, one.number] = one.shape
        for (number, _), shape in sorted(missing.items(), key=lambda item: item[0]):
            real = self._communicators[number].real
            own_shape = plan_stand_in(shape, real.Get_rank())
            job = call_of(own_shape, bytearray(own_shape.send_bytes))
            words = self._as_real(job, bytearray(own_shape.receive_bytes))
            self._stand_ins.append((words.start(real), words))

    def _tell(self, begun: OpenCall, shape: CallShape) -> ToldCall:
        members = self._communicators[begun.request.comm].members
        return ToldCall(begun.request.comm, members[0], len(members), begun.number, self._wire.rank, shape)

    @property
    def is_running(self) -> bool:
        """Whether something runs on the real MPI, except what the engine does."""
        gates = (self._communicators[number].gate for number in self._gated)
        return bool(self._running or self._stand_ins) or not all(gate.Test() for gate in gates)

    def watched(self) -> list[Any]:
        """The real requests that run."""
        gates = (self._communicators[number].gate for number in self._gated)
        return [*gates, *(begun.started for begun in self._running)]

    @property
    def open(self) -> list[OpenCall]:
        """The collectives that were entered and are not complete, except those of the engine."""
        return [*self._running, *(begun for comm in self._communicators.values() for begun in comm.waiting)]

    def release(self) -> None:
        """Drop the real communicators: they end with the library."""
        self.reals.clear()
        for comm in self._communicators.values():
            comm.real = None
