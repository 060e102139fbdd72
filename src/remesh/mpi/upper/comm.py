"""Communicators: what all kinds share, and intracommunicators."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Self

from remesh.mpi.upper import constants as k
from remesh.mpi.upper import topologies
from remesh.mpi.upper.attributes import WithAttributes
from remesh.mpi.upper.collective import EVERYWHERE, WITHIN, add_forms
from remesh.mpi.upper.environment import description
from remesh.mpi.upper.errhandling import WithErrhandler, abort
from remesh.mpi.upper.exceptions import Errhandler, Exception, failure, last_used_code
from remesh.mpi.upper.group import Group
from remesh.mpi.upper.handles import Handle
from remesh.mpi.upper.info import Info, WithInfo
from remesh.mpi.upper.link import link
from remesh.mpi.upper.membership import WORLD, Members, make, number_of
from remesh.mpi.upper.objects import Objects, allgather
from remesh.mpi.upper.point_to_point import PointToPoint
from remesh.mpi.upper.request import Request, Work

_GUIDED = (k.COMM_TYPE_HW_GUIDED, k.COMM_TYPE_RESOURCE_GUIDED)
_RESOURCE, _SHARED_MEMORY = "mpi_hw_resource_type", "mpi_shared_memory"
"""Key and value of an info that guides a split by the memory that a host's ranks share."""


class Comm(PointToPoint, Objects, WithErrhandler, WithInfo, WithAttributes, Handle):
    """A communicator."""

    __slots__ = ()

    @property
    def _members(self) -> Members:  # type: ignore[override]  # a plain annotation in the mixins
        if self._h is None:
            raise failure("ERR_COMM", "the communicator is null or has been freed")
        members: Members = self._h
        return members

    _content = _members

    @classmethod
    def _class_for(cls, content: Members) -> Any:
        if content.remote is not None:
            return INTERCOMM[0]
        return Intracomm if content.topology is None else TOPOLOGY_CLASSES[type(content.topology).__name__]

    # Groups.

    def Get_size(self) -> int:
        return len(self._members.ranks)

    def Get_rank(self) -> int:
        return self._members.rank

    def Get_group(self) -> Group:
        return Group._of(self._members.ranks, self._members.ranks[self._members.rank])

    size = property(Get_size)
    rank = property(Get_rank)
    group = property(Get_group)

    def Compare(self, comm: Comm) -> int:
        one, two = self._members, comm._members
        if one is two:
            return k.IDENT
        if (one.remote is None) != (two.remote is None):
            return k.UNEQUAL
        if (one.ranks, one.remote) == (two.ranks, two.remote):
            return k.CONGRUENT
        same = sorted(one.ranks) == sorted(two.ranks) and sorted(one.remote or ()) == sorted(two.remote or ())
        return k.SIMILAR if same else k.UNEQUAL

    def Is_inter(self) -> bool:
        return self._members.remote is not None

    def Is_intra(self) -> bool:
        return self._members.remote is None

    is_inter = property(lambda self: self._h is not None and self.Is_inter())
    is_intra = property(lambda self: self._h is not None and self.Is_intra())

    # Constructors; the new communicator has the class that its kind asks for.

    def Dup(self, info: Info | None = None) -> Self:
        members = self._members
        copy = self._copy(members)
        copy.info = dict(info.items()) if info is not None and info else dict(members.info)
        twin = type(self)._wrap(copy)
        self._copy_attributes(twin)
        return twin

    def _copy(self, members: Members) -> Members:
        copy = make(members, members.next_number("dup"), members.ranks)
        copy.topology = members.topology
        return copy

    def Dup_with_info(self, info: Info) -> Self:
        return self.Dup(info)

    def Idup(self, info: Info | None = None) -> tuple[Self, Request]:
        return self.Dup(info), Request._wrap(Work([]))

    Idup_with_info = Idup

    def Clone(self) -> Self:
        return self.Dup()

    def Create(self, group: Group) -> Any:
        raise self._abstract("Create")

    def Split(self, color: int = 0, key: int = 0) -> Any:
        raise self._abstract("Split")

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:
        raise self._abstract("Split_type")

    def _abstract(self, call: str) -> Exception:
        return failure("ERR_COMM", f"{call} on a communicator that is neither of one group nor of two")

    def _made(self, ranks: Sequence[int] | None, number: int) -> Members | None:
        """A communicator of these world ranks, None if this process is not one of them."""
        members = self._members
        own = members.ranks[members.rank]
        return make(members, number, ranks) if ranks is not None and own in ranks else None

    def Free(self) -> None:
        members = self._members
        if members.predefined:
            raise failure("ERR_COMM", f"{members.name} cannot be freed")
        self._delete_attributes()
        members.forget()
        self._h = None

    def Disconnect(self) -> None:
        self.Free()

    # Names, info, attributes, errors.

    def Get_name(self) -> str:
        return "MPI_COMM_NULL" if self._h is None else self._members.name

    def Set_name(self, name: str) -> None:
        self._members.name = name

    name = property(Get_name, Set_name)

    def _predefined_attribute(self, keyval: int) -> Any:
        _ = self._members
        known = {
            k.TAG_UB: k.TAG_UB_VALUE,
            k.IO: k.ANY_SOURCE,
            k.WTIME_IS_GLOBAL: False,
            k.HOST: k.PROC_NULL,
            k.LASTUSEDCODE: last_used_code(),
            k.APPNUM: 0,
            k.UNIVERSE_SIZE: link().hello()[1],
        }
        return known[keyval] if keyval in known else super()._predefined_attribute(keyval)

    def Abort(self, errorcode: int = 0) -> None:
        """End the whole job."""
        abort(errorcode)

    # Topology.

    def Get_topology(self) -> int:
        topology = self._members.topology
        return k.UNDEFINED if topology is None else int(topology.kind)

    topology = property(Get_topology)
    is_topo = property(lambda self: self._h is not None and self._members.topology is not None)

    # Faults: a rank that dies ends the job, so no survivor ever asks these in vain.

    def Revoke(self, *args: Any, **named: Any) -> Any:
        calls = "Revoke, Shrink, Ishrink, Agree, Iagree"
        raise NotImplementedError(f"MPI.Comm.{calls}: a job whose rank dies is restarted from its last checkpoint")

    Shrink = Ishrink = Agree = Iagree = Revoke

    def Is_revoked(self) -> bool:
        return False

    def Get_failed(self) -> Group:
        return Group._of((), self._members.ranks[self._members.rank])

    def Ack_failed(self, num_to_ack: int | None = None) -> int:
        return 0

    # Processes that were not there at the start.

    @classmethod
    def Get_parent(cls) -> Any:
        return COMM_NULL_INTER[0]

    @classmethod
    def Join(cls, fd: int) -> Any:
        raise NotImplementedError("MPI.Comm.Join: the number of ranks is fixed")


add_forms(Comm, EVERYWHERE)
COMM_NULL_INTER: list[Any] = []
"""The null intercommunicator, put here by its module."""


class Intracomm(Comm):
    """A communicator of one group."""

    __slots__ = ()

    @classmethod
    def _expect(cls, content: Members) -> None:
        if content.remote is not None:
            raise TypeError("expecting an intracommunicator")

    def Create(self, group: Group) -> Any:
        # Disjoint groups may call this at once, each for a communicator of its own.
        number = number_of(self._members.next_number("create"), *group._ranks)
        return self._plain(self._made(group._ranks or None, number))

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        members = self._members
        number = number_of(members.number, "group", tag, members.next_of_group((group._ranks, tag)), *group._ranks)
        return self._plain(self._made(group._ranks or None, number))

    @classmethod
    def Create_from_group(
        cls,
        group: Group,
        stringtag: str = "org.mpi4py",
        info: Info | None = None,
        errhandler: Errhandler | None = None,
    ) -> Any:
        """A communicator of a group, which need not come from a communicator; its members call this."""
        made = predefined()[0].Create_group(group, number_of(stringtag) % k.TAG_UB_VALUE)
        if made:
            made._members.info = dict(info.items()) if info else {}
            made._members.errhandler = Errhandler(errhandler) if errhandler else None
        return made

    def _plain(self, made: Members | None) -> Any:
        return Intracomm._wrap(made)

    def Split(self, color: int = 0, key: int = 0) -> Any:
        members = self._members
        number = members.next_number("split")
        chosen = allgather(members, (int(color), int(key)))
        if color == k.UNDEFINED:
            return Intracomm()
        order = sorted((key, rank) for rank, (other, key) in enumerate(chosen) if other == color)
        ranks = [members.ranks[rank] for _, rank in order]
        return self._plain(make(members, number_of(number, color), ranks))

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:
        """Ranks of one host together; the placement at a restart is not looked at again.

        No other resource of a host is told apart: a guided split by one, and an unguided one, give COMM_NULL.
        """
        wanted = info.Get(_RESOURCE) if split_type in _GUIDED and info else None
        if split_type != k.COMM_TYPE_SHARED and wanted != _SHARED_MEMORY:
            return self.Split(k.UNDEFINED)
        return self.Split(number_of(str(description()["processor_name"])) % k.TAG_UB_VALUE, key)

    def Create_intercomm(self, local_leader: int, peer_comm: Intracomm, remote_leader: int, tag: int = 0) -> Any:
        return INTERCOMM[0]._join(self, local_leader, peer_comm, remote_leader, tag)

    # Topologies.

    def Create_cart(
        self, dims: Sequence[int], periods: Sequence[bool] | bool | None = None, reorder: bool = False
    ) -> Any:
        cart = topologies.Cart.of(dims, periods)
        return self._with_topology(cart, cart.num_ranks, "Cart")

    def Create_graph(self, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:
        graph = topologies.Graph.of(index, edges)
        return self._with_topology(graph, len(graph.index), "Graph")

    def _with_topology(self, topology: Any, num_ranks: int, kind: str) -> Any:
        members = self._members
        if num_ranks > len(members.ranks):
            raise failure("ERR_TOPOLOGY", f"a topology of {num_ranks} ranks on a communicator of {len(members.ranks)}")
        made = self._made(members.ranks[:num_ranks], members.next_number("topology"))
        if made is not None:
            made.topology = topology
        return TOPOLOGY_CLASSES[kind]._wrap(made)

    def Create_dist_graph_adjacent(
        self,
        sources: Sequence[int],
        destinations: Sequence[int],
        sourceweights: Sequence[int] | None = None,
        destweights: Sequence[int] | None = None,
        info: Any = None,
        reorder: bool = False,
    ) -> Any:
        graph = topologies.DistGraph.of(sources, destinations, sourceweights, destweights)
        return self._with_topology(graph, len(self._members.ranks), "DistGraph")

    def Create_dist_graph(
        self,
        sources: Sequence[int],
        degrees: Sequence[int],
        destinations: Sequence[int],
        weights: Sequence[int] | None = None,
        info: Any = None,
        reorder: bool = False,
    ) -> Any:
        plain = None if weights is None or isinstance(weights, int) else list(map(int, weights))
        edges = topologies.edges_of(list(map(int, sources)), list(degrees), list(map(int, destinations)), plain)
        everybody = [edge for some in allgather(self._members, edges) for edge in some]
        graph = topologies.DistGraph.from_edges(everybody, self._members.rank, weighted=plain is not None)
        return self._with_topology(graph, len(self._members.ranks), "DistGraph")

    def Cart_map(self, dims: Sequence[int], periods: Sequence[bool] | None = None) -> int:
        num = topologies.Cart.of(dims, periods).num_ranks
        return self.Get_rank() if self.Get_rank() < num else k.UNDEFINED

    def Graph_map(self, index: Sequence[int], edges: Sequence[int]) -> int:
        return self.Get_rank() if self.Get_rank() < len(topologies.Graph.of(index, edges).index) else k.UNDEFINED

    # Processes that were not there at the start.

    def Spawn(self, *args: Any, **named: Any) -> Any:
        raise NotImplementedError("MPI.Intracomm.Spawn: the number of ranks is fixed; start more of them")

    def Spawn_multiple(self, *args: Any, **named: Any) -> Any:
        raise NotImplementedError("MPI.Intracomm.Spawn_multiple: the number of ranks is fixed; start more of them")

    def Accept(self, *args: Any, **named: Any) -> Any:
        raise NotImplementedError("MPI.Intracomm.Accept: ports between jobs are not carried over checkpoints")

    Connect = Accept


add_forms(Intracomm, WITHIN)
INTERCOMM: list[Any] = []
"""The class of intercommunicators, put here by its module."""
TOPOLOGY_CLASSES: dict[str, Any] = {}
"""Classes of communicators with a topology, put here by their module."""


def _world() -> Members:
    rank, size = link().hello()
    return Members(WORLD, tuple(range(size)), rank, name="MPI_COMM_WORLD", predefined=True)


def _self(world: Members) -> Members:
    own = world.ranks[world.rank]
    # Its number differs from rank to rank: no other rank ever hears it.
    members = Members(number_of("self", own), (own,), 0, name="MPI_COMM_SELF", predefined=True)
    members.register()
    return members


@functools.cache
def predefined() -> tuple[Intracomm, Intracomm]:
    """COMM_WORLD and COMM_SELF of this process; asks the lower half who it is, once."""
    world = _world()
    return Intracomm._wrap(world), Intracomm._wrap(_self(world))


COMM_NULL = Comm()


def exchange_leaders(comm: Comm, leader: int, peer: Comm, remote_leader: int, tag: int, obj: Any) -> Any:
    """What the remote leader has to say, for all members of ``comm``; only leaders use ``peer``."""
    from_them = None
    if comm.Get_rank() == leader:
        from_them = peer.sendrecv(obj, remote_leader, tag, None, remote_leader, tag)
    return comm.bcast(from_them, leader)
