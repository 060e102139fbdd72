"""Communicators with a topology, and collectives between neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remesh.mpi.upper import constants as k
from remesh.mpi.upper.buffers import Blocks, Parcel, Spec, parse, parse_blocks, parse_typed_blocks
from remesh.mpi.upper.collective import Prepare, add_forms
from remesh.mpi.upper.comm import TOPOLOGY_CLASSES, Intracomm
from remesh.mpi.upper.exceptions import failure
from remesh.mpi.upper.exchange import receive_block, send_block
from remesh.mpi.upper.membership import Members, make
from remesh.mpi.upper.pickles import dumps, loads
from remesh.mpi.upper.request import Request, Work, progress


@dataclass
class Neighbours:
    """One collective between neighbours: what each out-neighbour gets, where each in-neighbour's goes."""

    sends: list[memoryview]
    into: list[Any]  # landings, in order of the in-neighbours


def _peers(m: Members) -> tuple[list[int], list[int]]:
    """In- and out-neighbours, as ranks of the communicator."""
    if m.topology is None:
        raise failure("ERR_TOPOLOGY", "the communicator has no topology")
    return m.topology.sources(m.rank), m.topology.destinations(m.rank)


def run(m: Members, exchange: Neighbours, *, blocking: bool) -> Work:
    """Start a collective between neighbours."""
    sources, destinations = _peers(m)
    operations = []
    for index, (rank, landing) in enumerate(zip(sources, exchange.into, strict=True)):
        if rank != k.PROC_NULL:
            tag = 0 if m.topology.kind != k.CART else index
            operations.append(receive_block(m, m.ranks[rank], landing, tag))
    for index, (rank, block) in enumerate(zip(destinations, exchange.sends, strict=True)):
        if rank != k.PROC_NULL:
            operations.append(send_block(m, m.ranks[rank], block, m.topology.send_tag(index)))
    return Work(operations)


def _run_now(m: Members, exchange: Neighbours) -> None:
    Request._wrap(run(m, exchange, blocking=True)).Wait()


def _parts(spec: Spec, num: int) -> list[Spec]:
    return [spec.part(index, num) for index in range(num)]


def _allgather(m: Members, sendbuf: Any, recvbuf: Any) -> Neighbours:
    sources, destinations = _peers(m)
    send = parse(sendbuf).payload()
    into = _parts(parse(recvbuf, len(sources)), len(sources))
    return Neighbours([send] * len(destinations), [part.landing() for part in into])


def _allgatherv(m: Members, sendbuf: Any, recvbuf: Any) -> Neighbours:
    sources, destinations = _peers(m)
    send = parse(sendbuf).payload()
    blocks = parse_blocks(recvbuf, len(sources))
    return Neighbours([send] * len(destinations), [part.landing() for part in blocks.parts])


def _alltoall(m: Members, sendbuf: Any, recvbuf: Any) -> Neighbours:
    sources, destinations = _peers(m)
    sends = _parts(parse(sendbuf, len(destinations)), len(destinations))
    into = _parts(parse(recvbuf, len(sources)), len(sources))
    return Neighbours([part.payload() for part in sends], [part.landing() for part in into])


def _of_blocks(sends: Blocks, into: Blocks) -> Neighbours:
    return Neighbours([part.payload() for part in sends.parts], [part.landing() for part in into.parts])


def _alltoallv(m: Members, sendbuf: Any, recvbuf: Any) -> Neighbours:
    sources, destinations = _peers(m)
    return _of_blocks(parse_blocks(sendbuf, len(destinations)), parse_blocks(recvbuf, len(sources)))


def _alltoallw(m: Members, sendbuf: Any, recvbuf: Any) -> Neighbours:
    sources, destinations = _peers(m)
    return _of_blocks(parse_typed_blocks(sendbuf, len(destinations)), parse_typed_blocks(recvbuf, len(sources)))


BETWEEN_NEIGHBOURS: dict[str, Prepare] = {
    "Neighbor_allgather": _allgather,  # type: ignore[dict-item]  # prepares Neighbours, for the run of this module
    "Neighbor_allgatherv": _allgatherv,  # type: ignore[dict-item]
    "Neighbor_alltoall": _alltoall,  # type: ignore[dict-item]
    "Neighbor_alltoallv": _alltoallv,  # type: ignore[dict-item]
    "Neighbor_alltoallw": _alltoallw,  # type: ignore[dict-item]
}


class Topocomm(Intracomm):
    """A communicator with a topology."""

    __slots__ = ()
    _kinds: tuple[int, ...] = (k.CART, k.GRAPH, k.DIST_GRAPH)

    @classmethod
    def _expect(cls, content: Members) -> None:
        if content.topology is None or content.topology.kind not in cls._kinds:
            raise TypeError(f"expecting a communicator with the topology of a {cls.__name__}")

    @property
    def degrees(self) -> tuple[int, int]:
        sources, destinations = _peers(self._members)
        return len(sources), len(destinations)

    indegree = property(lambda self: self.degrees[0])
    outdegree = property(lambda self: self.degrees[1])
    inoutedges = property(lambda self: _peers(self._members))
    inedges = property(lambda self: _peers(self._members)[0])
    outedges = property(lambda self: _peers(self._members)[1])

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        _, destinations = _peers(self._members)
        return self.neighbor_alltoall([sendobj] * len(destinations))

    def neighbor_alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        sources, destinations = _peers(self._members)
        objects = list(sendobj)
        if len(objects) != len(destinations):
            raise ValueError(f"expecting {len(destinations)} items, got {len(objects)}")
        parcels = [Parcel() for _ in sources]
        work = run(self._members, Neighbours([dumps(one) for one in objects], parcels), blocking=True)
        progress([work], blocking=True, every=True)
        return [loads(parcel.data) for parcel in parcels]


add_forms(Topocomm, BETWEEN_NEIGHBOURS, run, _run_now)


class Cartcomm(Topocomm):
    """A communicator on a grid."""

    __slots__ = ()
    _kinds = (k.CART,)

    def Get_dim(self) -> int:
        return len(self._members.topology.dims)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        cart = self._members.topology
        return list(cart.dims), [int(p) for p in cart.periods], cart.coords(self._members.rank)

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        cart = self._members.topology
        for n, periodic, at in zip(cart.dims, cart.periods, coords, strict=False):
            if not periodic and not 0 <= at < n:
                raise failure("ERR_ARG", f"coordinates {list(coords)} outside a grid {cart.dims}")
        return int(cart.rank(coords))

    def Get_coords(self, rank: int) -> list[int]:
        found: list[int] = self._members.topology.coords(rank)
        return found

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        both: tuple[int, int] = self._members.topology.shift(self._members.rank, direction, disp)
        return both

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        members = self._members
        cart = members.topology
        kept = [d for d, remains in enumerate(remain_dims) if remains]
        here = cart.coords(members.rank)
        fixed = tuple(here[d] for d in range(len(cart.dims)) if d not in kept)
        number = members.next_number("sub", *fixed)
        ranks = [
            members.ranks[rank]
            for rank in range(cart.num_ranks)
            if tuple(c for d, c in enumerate(cart.coords(rank)) if d not in kept) == fixed
        ]
        made = make(members, number, ranks)
        made.topology = type(cart)(tuple(cart.dims[d] for d in kept), tuple(cart.periods[d] for d in kept))
        return Cartcomm._wrap(made)

    dim = property(Get_dim)
    ndim = property(Get_dim)
    topo = property(Get_topo)
    dims = property(lambda self: self.Get_topo()[0])
    periods = property(lambda self: self.Get_topo()[1])
    coords = property(lambda self: self.Get_topo()[2])


class Graphcomm(Topocomm):
    """A communicator on a graph that all know."""

    __slots__ = ()
    _kinds = (k.GRAPH,)

    def Get_dims(self) -> tuple[int, int]:
        graph = self._members.topology
        return len(graph.index), len(graph.edges)

    def Get_topo(self) -> tuple[list[int], list[int]]:
        graph = self._members.topology
        return list(graph.index), list(graph.edges)

    def Get_neighbors_count(self, rank: int) -> int:
        return len(self.Get_neighbors(rank))

    def Get_neighbors(self, rank: int) -> list[int]:
        found: list[int] = self._members.topology.sources(rank)
        return found

    dims = property(Get_dims)
    topo = property(Get_topo)
    nnodes = property(lambda self: self.Get_dims()[0])
    nedges = property(lambda self: self.Get_dims()[1])
    index = property(lambda self: self.Get_topo()[0])
    edges = property(lambda self: self.Get_topo()[1])
    nneighbors = property(lambda self: self.Get_neighbors_count(self.Get_rank()))
    neighbors = property(lambda self: self.Get_neighbors(self.Get_rank()))


class Distgraphcomm(Topocomm):
    """A communicator on a graph of which everybody knows their own edges."""

    __slots__ = ()
    _kinds = (k.DIST_GRAPH,)

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        graph = self._members.topology
        weighted = graph.source_weights is not None or graph.destination_weights is not None
        return len(graph.source_ranks), len(graph.destination_ranks), weighted

    def Get_dist_neighbors(self) -> tuple[list[int], list[int], Any]:
        graph = self._members.topology
        weights = None
        if self.Get_dist_neighbors_count()[2]:
            weights = list(graph.source_weights or ()), list(graph.destination_weights or ())
        return list(graph.source_ranks), list(graph.destination_ranks), weights


TOPOLOGY_CLASSES.update(Cart=Cartcomm, Graph=Graphcomm, DistGraph=Distgraphcomm)
