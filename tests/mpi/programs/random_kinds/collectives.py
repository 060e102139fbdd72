"""Collectives: a table of calls, each blocking, non-blocking (left open over steps) or persistent."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from random_kinds.state import State, one_of

_PRIME = 1_000_003
_COUNTS = (0, 1, 1, 3, 100, 100, 4095, 4096, 4097, 40_000, 200_000)
"""Numbers of 8 bytes for each rank: around 32 KiB, and long ones."""


def _int64(operand: Any) -> np.ndarray:
    # NumPy reads MPI.buffer itself only where that exports its memory: not before Python 3.12 without the C extension.
    return np.frombuffer(operand.cast("B"), np.int64)


def _compose(first: Any, second: Any, _datatype: Any) -> None:
    """``second`` after ``first``, both maps ``x -> a x + b``: associative, and not commutative."""
    a, b = _int64(first).reshape(-1, 2).T, _int64(second).reshape(-1, 2)
    b[:, 1] = (b[:, 0] % _PRIME * (a[1] % _PRIME) + b[:, 1]) % _PRIME
    b[:, 0] = b[:, 0] % _PRIME * (a[0] % _PRIME) % _PRIME


def _farther(first: Any, second: Any, _datatype: Any) -> None:
    """The number that is larger modulo a prime, and then by itself."""
    a, b = _int64(first), _int64(second)
    b[:] = np.where((a % _PRIME > b % _PRIME) | ((a % _PRIME == b % _PRIME) & (a > b)), a, b)


@dataclass
class Case:
    """What a call of the table is made of, on one rank."""

    state: State
    comm: Any
    count: int
    """Elements for each rank; the v-forms vary it."""
    root: int
    width: int = 1
    """Integers in an element."""
    datatype: MPI.Datatype = field(default_factory=lambda: MPI.INT64_T)
    op: MPI.Op = field(default_factory=lambda: MPI.SUM)

    @property
    def counts(self) -> list[int]:
        """Elements of each rank in the v-forms."""
        return [(self.count + 2 * rank) % (self.count + 3) for rank in range(self.comm.size)]

    @property
    def places(self) -> list[int]:
        """Where they begin: with gaps between them."""
        return [sum(self.counts[:rank]) + rank for rank in range(self.comm.size)]

    def mine(self, blocks: int = 1) -> np.ndarray:
        """Numbers of this rank."""
        return self.state.numbers(blocks, blocks * self.count * self.width)

    def mine_of(self, count: int) -> np.ndarray:
        """So many elements."""
        return self.state.numbers(count, count * self.width)

    def zeros(self, blocks: int = 1) -> np.ndarray:
        """Room for them."""
        return np.zeros(blocks * self.count * self.width, np.int64)

    def spread(self, fill: bool) -> np.ndarray:
        """For the elements of all ranks in a v-form."""
        length = (self.places[-1] + self.counts[-1]) * self.width
        return self.state.numbers(9, length) if fill else np.zeros(length, np.int64)

    def of(self, data: np.ndarray) -> Any:
        """The buffer as a call takes it."""
        return [data, self.datatype]

    def v(self, data: np.ndarray) -> Any:
        """The buffer of a v-form."""
        return [data, (self.counts, self.places), self.datatype]

    @property
    def at_root(self) -> bool:
        """Whether this rank is the root."""
        return bool(self.comm.rank == self.root)


Call = tuple[tuple[Any, ...], Any]
"""The arguments, and the array that the call fills (None: nothing on this rank)."""


def _bcast(c: Case) -> Call:
    data = c.mine() if c.at_root else c.zeros()
    return (c.of(data), c.root), data


def _gather(c: Case) -> Call:
    into = c.zeros(c.comm.size) if c.at_root else None
    return (c.of(c.mine()), None if into is None else c.of(into), c.root), into


def _gather_in_place(c: Case) -> Call:
    into = c.mine(c.comm.size) if c.at_root else None
    return (c.of(c.mine()) if into is None else MPI.IN_PLACE, None if into is None else c.of(into), c.root), into


def _gatherv(c: Case) -> Call:
    into = c.spread(fill=False) if c.at_root else None
    return (c.of(c.mine_of(c.counts[c.comm.rank])), None if into is None else c.v(into), c.root), into


def _scatter(c: Case) -> Call:
    into = c.zeros()
    return (c.of(c.mine(c.comm.size)) if c.at_root else None, c.of(into), c.root), into


def _scatterv(c: Case) -> Call:
    into = np.zeros(c.counts[c.comm.rank] * c.width, np.int64)
    return (c.v(c.spread(fill=True)) if c.at_root else None, c.of(into), c.root), into


def _allgather(c: Case) -> Call:
    into = c.zeros(c.comm.size)
    return (c.of(c.mine()), c.of(into)), into


def _allgather_in_place(c: Case) -> Call:
    into = c.mine(c.comm.size)
    return (MPI.IN_PLACE, c.of(into)), into


def _allgatherv(c: Case) -> Call:
    into = c.spread(fill=False)
    return (c.of(c.mine_of(c.counts[c.comm.rank])), c.v(into)), into


def _alltoall(c: Case) -> Call:
    into = c.zeros(c.comm.size)
    return (c.of(c.mine(c.comm.size)), c.of(into)), into


def _alltoall_in_place(c: Case) -> Call:
    into = c.mine(c.comm.size)
    return (MPI.IN_PLACE, c.of(into)), into


def _pairs(c: Case) -> tuple[list[int], list[int]]:
    """Elements between this rank and each other one, the same both ways, and where they begin."""
    size = c.comm.size
    counts = [(c.count + c.comm.rank + rank) // size for rank in range(size)]
    return counts, [sum(counts[:rank]) + 2 * rank for rank in range(size)]


def _alltoallv(c: Case) -> Call:
    counts, places = _pairs(c)
    data = c.mine_of(places[-1] + counts[-1])
    into = np.zeros_like(data)
    return ([data, (counts, places), c.datatype], [into, (counts, places), c.datatype]), into


def _alltoallw(c: Case) -> Call:
    counts, places = _pairs(c)
    data = c.mine_of(places[-1] + counts[-1])
    into = np.zeros_like(data)
    where, types = [8 * c.width * place for place in places], [c.datatype] * len(counts)
    return ([data, counts, where, types], [into, counts, where, types]), into


def _reduce(c: Case) -> Call:
    into = c.zeros() if c.at_root else None
    return (c.of(c.mine()), None if into is None else c.of(into), c.op, c.root), into


def _reduce_in_place(c: Case) -> Call:
    into = c.mine()
    given = (MPI.IN_PLACE, c.of(into)) if c.at_root else (c.of(into), None)
    return (*given, c.op, c.root), into


def _allreduce(c: Case) -> Call:
    into = c.zeros()
    return (c.of(c.mine()), c.of(into), c.op), into


def _allreduce_in_place(c: Case) -> Call:
    into = c.mine()
    return (MPI.IN_PLACE, c.of(into), c.op), into


def _reduce_scatter(c: Case) -> Call:
    into = np.zeros(c.counts[c.comm.rank] * c.width, np.int64)
    return (c.of(c.mine_of(sum(c.counts))), c.of(into), c.counts, c.op), into


def _reduce_scatter_block(c: Case) -> Call:
    into = c.zeros()
    return (c.of(c.mine(c.comm.size)), c.of(into), c.op), into


CALLS: dict[str, tuple[tuple[str, Callable[[Case], Call]], ...]] = {
    "moves": (
        ("Barrier", lambda c: ((), None)),
        ("Bcast", _bcast),
        ("Gather", _gather),
        ("Gather", _gather_in_place),
        ("Gatherv", _gatherv),
        ("Scatter", _scatter),
        ("Scatterv", _scatterv),
        ("Allgather", _allgather),
        ("Allgather", _allgather_in_place),
        ("Allgatherv", _allgatherv),
        ("Alltoall", _alltoall),
        ("Alltoall", _alltoall_in_place),
        ("Alltoallv", _alltoallv),
        ("Alltoallw", _alltoallw),
    ),
    "folds": (
        ("Reduce", _reduce),
        ("Reduce", _reduce_in_place),
        ("Allreduce", _allreduce),
        ("Allreduce", _allreduce_in_place),
        ("Reduce_scatter", _reduce_scatter),
        ("Reduce_scatter_block", _reduce_scatter_block),
        ("Scan", _allreduce),
        ("Scan", _allreduce_in_place),
        ("Exscan", _allreduce),
        ("Exscan", _allreduce_in_place),
    ),
}
"""Names, without ``I`` and ``_init``, with what they are called with."""


@dataclass
class _Drawn:
    name: str
    case: Case
    arguments: tuple[Any, ...]
    into: Any

    def tell(self) -> None:
        """Fold what was got, and give the type and the operation back if they were made here."""
        c = self.case
        undefined = self.name == "Exscan" and c.comm.rank == 0
        c.state.fold(self.name, None if undefined or self.into is None else self.into)
        if c.width > 1:
            c.datatype.Free()
        if not c.op.is_predefined:
            c.op.Free()


def _drawn(state: State, chance: random.Random, comm: Any) -> _Drawn:
    family = chance.choice(("moves", "folds"))
    name, make = chance.choice(CALLS[family])
    case = Case(state, comm, chance.choice(_COUNTS), one_of(chance, comm.size))
    drawn = chance.randrange(10)
    if drawn < 2:
        # A pair is one element, so that no algorithm takes it apart.
        case.width, case.datatype = 2, MPI.INT64_T.Create_contiguous(2).Commit()
        case.op = MPI.Op.Create(_compose, commute=False)
    elif drawn < 4:
        case.op = MPI.Op.Create(_farther, commute=True)
    else:
        case.op = (MPI.SUM, MPI.MAX, MPI.MIN, MPI.BXOR, MPI.BAND, MPI.BOR)[drawn - 4]
    return _Drawn(name, case, *make(case))


def blocking(state: State, chance: random.Random) -> None:
    """The usual form."""
    drawn = _drawn(state, chance, chance.choice(state.comms + state.twins))
    getattr(drawn.case.comm, drawn.name)(*drawn.arguments)
    drawn.tell()


def left_open(state: State, chance: random.Random) -> None:
    """Non-blocking, on the same communicator or several, over some steps."""
    drawn = [_drawn(state, chance, chance.choice(state.comms + state.twins)) for _ in range(chance.randint(1, 3))]
    requests = [getattr(each.case.comm, f"I{each.name.lower()}")(*each.arguments) for each in drawn]
    is_reversed = chance.random() < 0.5

    def finish() -> None:
        for request in reversed(requests) if is_reversed else requests:
            request.Wait()
        for each in drawn:
            each.tell()

    state.leave(chance, finish)


def persistent(state: State, chance: random.Random) -> None:
    """Made once, started twice."""
    drawn = _drawn(state, chance, chance.choice(state.comms + state.twins))
    request = getattr(drawn.case.comm, f"{drawn.name}_init")(*drawn.arguments)
    request.Start()
    request.Wait()
    request.Start()

    def finish() -> None:
        request.Wait()
        request.Free()
        drawn.tell()

    state.leave(chance, finish)


def _joined(first: Any, second: Any) -> Any:
    return first + second


def objects(state: State, chance: random.Random) -> None:
    """Pickled forms; the operation joins lists, so their order is seen."""
    comm, length = chance.choice(state.comms + state.twins), state.length(chance)
    root, way = one_of(chance, comm.size), chance.randrange(9)
    thing, items = state.thing(0, length), [state.thing(each, length // 8) for each in range(comm.size)]
    calls: tuple[Callable[[], Any], ...] = (
        lambda: comm.bcast(thing if comm.rank == root else None, root),
        lambda: comm.gather(thing, root),
        lambda: comm.scatter(items if comm.rank == root else None, root),
        lambda: comm.allgather(thing),
        lambda: comm.alltoall(items),
        lambda: comm.reduce([state.rank], _joined, root),
        lambda: comm.allreduce([state.rank, length], _joined),
        lambda: comm.scan([state.rank], _joined),
        lambda: comm.exscan([state.rank], _joined),
    )
    state.fold(calls[way]())


def across(state: State, chance: random.Random) -> None:
    """Two halves of the world talk over an intercommunicator."""
    if state.size == 1:
        return
    count, is_upper = chance.choice(_COUNTS), state.rank >= state.size // 2
    half = state.world.Split(int(is_upper), state.rank)
    inter = half.Create_intercomm(0, state.world, 0 if is_upper else state.size // 2, 7)
    far = np.zeros(count * inter.remote_size, np.int64)
    request = inter.Iallgather(state.numbers(0, count), far)
    total, own = np.zeros(count, np.int64), state.numbers(1, count)
    inter.Allreduce(own, total, MPI.MAX)
    request.Wait()
    root = (MPI.ROOT if half.rank == 0 else MPI.PROC_NULL) if is_upper else 0
    inter.Bcast(own, root)
    objects_seen = inter.alltoall([(state.rank, other) for other in range(inter.remote_size)])
    partner = half.rank % inter.remote_size
    sends = [inter.Isend(own, other, 4) for other in range(inter.remote_size) if other % half.size == half.rank]
    sends += [inter.Isend(own, partner, 5)]
    into = np.zeros(count, np.int64)
    status = MPI.Status()
    inter.Recv(into, half.rank % inter.remote_size, 4, status)
    state.fold(far, total, own if not is_upper else None, objects_seen, into, status.source)
    for source in range(inter.remote_size):
        if source % half.size == half.rank:
            inter.Recv(into, source, 5)
            state.fold(into)
    MPI.Request.Waitall(sends)
    merged = inter.Merge(is_upper)
    state.fold(merged.rank, merged.allgather(state.rank))
    for comm in (merged, inter, half):
        comm.Free()


def neighbours(state: State, chance: random.Random) -> None:
    """On a torus or a random graph, in four forms."""
    count, form = chance.choice(_COUNTS), chance.choice(("", "I", "_init"))
    if chance.random() < 0.5:
        dims = MPI.Compute_dims(state.size, 2)
        # Round a dimension of one or two places MPIs differ in which block comes from which side.
        periods = [dim > 2 and chance.random() < 0.5 for dim in dims]
        comm: Any = state.world.Create_cart(dims, periods, reorder=False)
        sources = targets = [rank for dim in range(2) for rank in comm.Shift(dim, 1)]
        state.fold(comm.coords, comm.Get_topo())
    else:
        edges = [(chance.randrange(state.size), chance.randrange(state.size)) for _ in range(2 * state.size)]
        edges = sorted(set(edges))
        sources = [one for one, other in edges if other == state.rank]
        targets = [other for one, other in edges if one == state.rank]
        comm = state.world.Create_dist_graph_adjacent(sources, targets)
    gathered, swapped = np.zeros(count * len(sources), np.int64), np.zeros(count * len(sources), np.int64)
    calls = [("allgather", state.numbers(0, count), gathered)]
    calls += [("alltoall", state.numbers(1, count * len(targets)), swapped)]
    for name, data, into in calls:
        if form == "_init":
            request = getattr(comm, f"Neighbor_{name}_init")(data, into)
            request.Start()
            request.Wait()
            request.Free()
        elif form == "I":
            getattr(comm, f"Ineighbor_{name}")(data, into).Wait()
        else:
            getattr(comm, f"Neighbor_{name}")(data, into)
    state.fold(gathered, swapped, comm.neighbor_allgather(state.rank))
    comm.Free()
