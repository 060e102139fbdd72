"""When may a window be accessed, and when are accesses over? Fences, groups of partners, locks, flushes.

All of it is made of ordinary traffic: a fence waits for this rank's accesses and enters a barrier; post, start,
complete and wait are empty messages on the window's own communicator; a lock is asked for at its target's lower half,
which keeps the queue. Accesses are carried out at once, whatever the epoch, and *pending* until they are answered.
Source: MPI 4.1, section 12.5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from remesh.mpi.calls.error_classes import TEXTS
from remesh.mpi.calls.table import BY_NAME, CallFlag, Kind
from remesh.mpi.upper import constants as k
from remesh.mpi.upper.attributes import Attributes
from remesh.mpi.upper.buffers import NOTHING
from remesh.mpi.upper.exceptions import failure, numbered_failure
from remesh.mpi.upper.exchange import Exchange, run_now
from remesh.mpi.upper.group import Group
from remesh.mpi.upper.link import link, port
from remesh.mpi.upper.membership import Members
from remesh.mpi.upper.point_to_point import send_now, start_receive
from remesh.mpi.upper.request import Operation, Work, progress

_LOCK, _UNLOCK = BY_NAME["lock"], BY_NAME["unlock"]
_POSTED, _COMPLETED = 1, 2
"""Tags on the window's own communicator."""
_NO_BYTES = memoryview(b"")


@dataclass(eq=False)
class Window:
    """Content of a Win."""

    members: Members  # its own communicator, which nobody else sends on
    flavor: int
    memory: memoryview  # what this rank gives; none of a dynamic window
    base: int  # address
    units: tuple[int, ...]  # bytes that displacements count in, by rank
    sizes: tuple[int, ...]  # bytes that each rank gave when it was made
    name: str = ""
    attributes: Attributes = field(default_factory=Attributes)
    errhandler: Any = None
    info: dict[str, str] = field(default_factory=dict)
    attached: dict[int, memoryview] = field(default_factory=dict)  # memory of a dynamic window, by address
    pending: dict[int, deque[Work]] = field(default_factory=dict)  # accesses that nobody has waited for, by rank
    fenced: bool = False  # a fence has opened an epoch
    locked: dict[int, bool] = field(default_factory=dict)  # by rank: whether its lower half knows
    locked_all: bool = False
    started: dict[int, Work] | None = None  # partners to access: receives of their word that they have posted
    posted: Work | None = None  # partners that access: receives of their word that they have completed
    places: tuple[tuple[int, int, int], ...] = field(init=False)  # by rank: the window's number, world rank, unit

    def __post_init__(self) -> None:
        self.places = tuple((self.members.number, *place) for place in zip(self.members.ranks, self.units, strict=True))

    def is_open_to(self, rank: int) -> bool:
        """Whether this rank may access that one now, without waiting for it."""
        if self.started is not None and rank in self.started:
            return self.started[rank].finished
        return self.fenced or self.locked_all or rank in self.locked

    def check_epoch(self, rank: int) -> None:
        """Whether this rank may access that one now; waits until it has posted. ERR_RMA_SYNC if it may not."""
        if self.is_open_to(rank):
            return
        if self.started is not None and rank in self.started:
            finish([self.started[rank]])
        else:
            raise failure(
                "ERR_RMA_SYNC", f"accessing rank {rank} outside any epoch: call Fence, Start, Lock or Lock_all before"
            )

    def note(self, rank: int, work: Work) -> None:
        """An access has begun."""
        pending = self.pending.setdefault(rank, deque())
        while pending and pending[0].finished:
            pending.popleft()
        pending.append(work)

    def flush(self, ranks: Iterable[int]) -> None:
        """Until all accesses to these ranks are over; raises what went wrong with the first one that failed."""
        works = [work for rank in ranks for work in self.pending.pop(rank, ()) if not work.finished]
        finish(works)

    def barrier(self) -> None:
        """Until all ranks of the window have come."""
        run_now(self.members, Exchange(Kind.BARRIER))


@dataclass(frozen=True, slots=True)
class Aim:
    """What an access is to, for errors."""

    call: str
    num_bytes: int
    displacement: int
    rank: int


class Access(Work):
    """An access under way."""

    def __init__(
        self, operations: list[Operation], window: Window, aim: Aim, finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__(operations, finish=finish)
        self._window, self._aim = window, aim

    @property
    def what(self) -> str:
        """For errors."""
        aim, unit, size = self._aim, self._window.units[self._aim.rank], self._window.sizes[self._aim.rank]
        return (
            f"{aim.call}: {aim.num_bytes} bytes from displacement {aim.displacement} (of {unit} bytes) on at rank "
            f"{aim.rank}, which gave {size} bytes"
        )


def finish(works: list[Work]) -> None:
    """Until all are over; the error of the first that failed is raised."""
    progress(works, blocking=True, every=True)
    failed = [(work, error) for work in works if (error := work.conclude())]
    if failed:
        work, error = failed[0]
        what = work.what if isinstance(work, Access) else "synchronization of a window"
        more = f", and {len(failed) - 1} more accesses failed" if len(failed) > 1 else ""
        raise numbered_failure(error, f"{what}: {TEXTS[error]}{more}")


class Epochs:
    """Mixin of Win: synchronization."""

    __slots__ = ()
    _window: Window

    def _rank(self, rank: int) -> int:
        """A rank of the window's group."""
        size = len(self._window.members.ranks)
        if not 0 <= rank < size:
            raise failure("ERR_RANK", f"rank {rank} of a window of {size}")
        return rank

    # All together.

    def Fence(self, assertion: int = 0) -> None:
        window = self._window
        window.flush(list(window.pending))
        window.barrier()
        window.fenced = not assertion & k.MODE_NOSUCCEED

    # Partners.

    def _partners(self, group: Group) -> list[int]:
        of_world = self._window.members.of_world
        strangers = [world for world in group._ranks if world not in of_world]
        if strangers:
            raise failure("ERR_GROUP", f"world ranks {strangers} are not in the window's group")
        return [of_world[world] for world in group._ranks]

    def Post(self, group: Group, assertion: int = 0) -> None:
        window = self._window
        if window.posted is not None:
            raise failure("ERR_RMA_SYNC", "Post: the window is exposed already; call Wait first")
        partners = self._partners(group)
        receives = [start_receive(window.members, NOTHING, rank, _COMPLETED) for rank in partners]
        window.posted = Work([one for receive in receives for one in receive.operations])
        if not assertion & k.MODE_NOCHECK:
            for rank in partners:
                send_now(window.members, _NO_BYTES, rank, _POSTED, 0)

    def Start(self, group: Group, assertion: int = 0) -> None:
        window = self._window
        if window.started is not None:
            raise failure("ERR_RMA_SYNC", "Start: an access epoch is open already; call Complete first")
        partners = self._partners(group)
        if assertion & k.MODE_NOCHECK:
            window.started = {rank: Work([]) for rank in partners}
        else:
            window.started = {rank: start_receive(window.members, NOTHING, rank, _POSTED) for rank in partners}

    def Complete(self) -> None:
        window = self._window
        if window.started is None:
            raise failure("ERR_RMA_SYNC", "Complete: no access epoch is open; call Start first")
        partners, window.started = window.started, None
        finish(list(partners.values()))
        try:
            window.flush(partners)
        finally:
            for rank in partners:
                send_now(window.members, _NO_BYTES, rank, _COMPLETED, 0)

    def _posted(self, call: str) -> Work:
        posted = self._window.posted
        if posted is None:
            raise failure("ERR_RMA_SYNC", f"{call}: the window is not exposed; call Post first")
        return posted

    def Wait(self) -> bool:
        finish([self._posted("Wait")])
        self._window.posted = None
        return True

    def Test(self) -> bool:
        posted = self._posted("Test")
        progress([posted], blocking=False, every=True)
        if posted.is_over:
            self._window.posted = None
        return posted.is_over

    # Locks.

    def Lock(self, rank: int, lock_type: int = k.LOCK_EXCLUSIVE, assertion: int = 0) -> None:
        if rank == k.PROC_NULL:
            return
        window = self._window
        if lock_type not in (k.LOCK_EXCLUSIVE, k.LOCK_SHARED):
            raise failure("ERR_LOCKTYPE", f"Lock: {lock_type}, expected LOCK_EXCLUSIVE or LOCK_SHARED")
        if self._rank(rank) in window.locked or window.locked_all:
            raise failure("ERR_RMA_SYNC", f"Lock: rank {rank} is locked by this rank already; call Unlock first")
        asks = not assertion & k.MODE_NOCHECK
        if asks:
            finish([_ask_for_lock(window, rank, lock_type, CallFlag.BLOCKING)])
        window.locked[rank] = asks

    def Unlock(self, rank: int) -> None:
        if rank == k.PROC_NULL:
            return
        window = self._window
        if rank not in window.locked:
            raise failure("ERR_RMA_SYNC", f"Unlock: this rank has no lock on rank {rank}; call Lock first")
        try:
            window.flush([rank])
        finally:
            _give_back(window, [rank])

    def Lock_all(self, assertion: int = 0) -> None:
        window = self._window
        if window.locked or window.locked_all:
            raise failure("ERR_RMA_SYNC", "Lock_all: this rank has locks already; call Unlock or Unlock_all first")
        ranks = range(len(window.members.ranks))
        asks = not assertion & k.MODE_NOCHECK
        if asks:
            finish([_ask_for_lock(window, rank, k.LOCK_SHARED, 0) for rank in ranks])
        window.locked, window.locked_all = dict.fromkeys(ranks, asks), True

    def Unlock_all(self) -> None:
        window = self._window
        if not window.locked_all:
            raise failure("ERR_RMA_SYNC", "Unlock_all: the ranks are not locked; call Lock_all first")
        window.locked_all = False
        try:
            window.flush(list(window.pending))
        finally:
            _give_back(window, list(window.locked))

    # Accesses that are over before their epoch is.

    def _check_locked(self, call: str, rank: int | None = None) -> None:
        window = self._window
        if not (window.locked if rank is None else rank in window.locked):
            where = "any rank" if rank is None else f"rank {rank}"
            raise failure("ERR_RMA_SYNC", f"{call}: this rank has no lock on {where}; call Lock or Lock_all first")

    def Flush(self, rank: int) -> None:
        self._check_locked("Flush", self._rank(rank))
        self._window.flush([rank])

    def Flush_all(self) -> None:
        self._check_locked("Flush_all")
        self._window.flush(list(self._window.pending))

    # An access is over at its target before its origin hears of it.
    Flush_local, Flush_local_all = Flush, Flush_all

    def Sync(self) -> None:
        """Nothing to do: others write to this process's own memory, of which there is no second copy."""
        _ = self._window


def _ask_for_lock(window: Window, rank: int, lock_type: int, flags: int) -> Work:
    fields = (flags, window.members.number, window.members.ranks[rank], int(lock_type == k.LOCK_EXCLUSIVE))
    return Work([Operation(link().started(_LOCK, fields))])


def _give_back(window: Window, ranks: list[int]) -> None:
    for rank in ranks:
        place = (window.members.number, window.members.ranks[rank])
        if window.locked.pop(rank) and not port().post_unlock(*place):
            link().ask(_UNLOCK, place)
