"""Intercommunicators: two groups that talk to each other."""

from __future__ import annotations

from typing import Any

from remesh.mpi.upper.comm import COMM_NULL_INTER, INTERCOMM, Comm, Intracomm, exchange_leaders, predefined
from remesh.mpi.upper.exceptions import failure
from remesh.mpi.upper.group import Group
from remesh.mpi.upper.membership import Members, make, number_of
from remesh.mpi.upper.objects import allgather


def _between(number: int, local: Members, remote: tuple[int, ...]) -> Members:
    """An intercommunicator; the local group gets a communicator of its own for what concerns it alone."""
    own = make(local, number_of(number, "local", min(local.ranks)), local.ranks)
    members = Members(number, local.ranks, local.rank, remote, own)
    members.errhandler = local.errhandler
    return members


class Intercomm(Comm):
    """A communicator of two groups."""

    __slots__ = ()

    @classmethod
    def _expect(cls, content: Members) -> None:
        if content.remote is None:
            raise TypeError("expecting an intercommunicator")

    @classmethod
    def _join(cls, local: Comm, leader: int, peer: Comm, remote_leader: int, tag: int) -> Intercomm:
        members = local._members
        mine = (members.number, members.next_number("inter"), members.ranks)
        theirs = exchange_leaders(local, leader, peer, remote_leader, tag, mine)
        if set(mine[2]) & set(theirs[2]):
            raise failure("ERR_COMM", "the two groups of an intercommunicator have ranks in common")
        number = number_of("inter", *sorted((mine[1], theirs[1])))
        return cls._wrap(_between(number, members, tuple(theirs[2])))

    def Get_remote_size(self) -> int:
        return len(self._members.peers)

    def Get_remote_group(self) -> Group:
        return Group._of(self._members.peers, self._members.ranks[self._members.rank])

    remote_size = property(Get_remote_size)
    remote_group = property(Get_remote_group)

    def _copy(self, members: Members) -> Members:
        assert members.local is not None
        return _between(members.next_number("dup"), members.local, members.peers)

    def Merge(self, high: bool = False) -> Any:
        members = self._members
        first = members.ranks, bool(high)
        second = self._told(first)
        # If both say the same, the group with the smaller rank leads: the same on both sides.
        mine_first = min(first[0]) < min(second[0]) if first[1] == second[1] else not first[1]
        ranks = (*first[0], *second[0]) if mine_first else (*second[0], *first[0])
        assert members.local is not None
        own = members.ranks[members.rank]
        parent = Members(members.number, ranks, ranks.index(own))
        return Intracomm._wrap(make(parent, members.next_number("merge"), ranks))

    def _told(self, obj: Any) -> Any:
        """What the remote group has to say: an object of its first rank; all members call this."""
        return allgather(self._members, obj)[0]

    def Create(self, group: Group) -> Any:
        members = self._members
        number = members.next_number("create")
        theirs = tuple(self._told(group._ranks))
        own = members.ranks[members.rank]
        if own not in group._ranks or not theirs:
            return Intercomm()
        parent = Members(number_of(number, "part", *group._ranks), group._ranks, group._ranks.index(own))
        return Intercomm._wrap(_between(number, parent, theirs))

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        raise NotImplementedError("MPI.Intercomm.Create_group: make the communicator from an intracommunicator")

    def Split(self, color: int = 0, key: int = 0) -> Any:
        members = self._members
        number = members.next_number("split")
        assert members.local is not None
        ours = self._part(members.local, color, key)
        everybody = allgather(members, (int(color), int(key), members.ranks[members.rank]))
        theirs = tuple(rank for _, _, rank in sorted((k, i, r) for i, (c, k, r) in enumerate(everybody) if c == color))
        if ours is None or not theirs:
            return Intercomm()
        parent = Members(number_of(number, color, "part", *ours), ours, ours.index(members.ranks[members.rank]))
        return Intercomm._wrap(_between(number_of(number, color), parent, theirs))

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:
        raise NotImplementedError("MPI.Intercomm.Split_type: split the groups before joining them")

    @classmethod
    def Create_from_groups(  # noqa: PLR0913 - mpi4py's arguments
        cls,
        local_group: Group,
        local_leader: int,
        remote_group: Group,
        remote_leader: int,
        stringtag: str = "org.mpi4py",
        info: Any = None,
        errhandler: Any = None,
    ) -> Intercomm:
        """Two groups that need not come from communicators; only the leader of a group needs to know the other one."""
        local = Intracomm.Create_from_group(local_group, f"{stringtag} within", info, errhandler)
        mine = local._members.ranks
        theirs = tuple(local.bcast(remote_group._ranks if local.Get_rank() == local_leader else None, local_leader))
        if set(mine) & set(theirs):
            raise failure("ERR_GROUP", "the two groups of an intercommunicator have ranks in common")
        pair = (stringtag, *sorted((mine, theirs)))
        number = number_of("groups", predefined()[0]._members.next_of_group(pair), *map(str, pair))
        members = Members(number, mine, local.Get_rank(), theirs, local._members)
        members.errhandler, members.info = local._members.errhandler, local._members.info
        return cls._wrap(members)

    def _part(self, local: Members, color: int, key: int) -> tuple[int, ...] | None:
        chosen = allgather(local, (int(color), int(key)))
        if color < 0:
            return None
        order = sorted((k, rank) for rank, (c, k) in enumerate(chosen) if c == color)
        return tuple(local.ranks[rank] for _, rank in order)


INTERCOMM.append(Intercomm)
COMM_NULL_INTER.append(Intercomm())
