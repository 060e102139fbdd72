"""Groups: ordered sets of ranks. All in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from remesh.mpi.upper import constants as k
from remesh.mpi.upper.exceptions import failure
from remesh.mpi.upper.handles import Handle


@dataclass(frozen=True, eq=False)
class _Members:
    """Content of a Group."""

    ranks: tuple[int, ...]  # world ranks, in order
    world_rank: int  # this process


class Group(Handle):
    """An ordered set of processes."""

    __slots__ = ()

    @property
    def _ranks(self) -> tuple[int, ...]:
        if self._h is None:
            raise failure("ERR_GROUP", "the group is null or has been freed")
        ranks: tuple[int, ...] = self._h.ranks
        return ranks

    @classmethod
    def _of(cls, ranks: Sequence[int], world_rank: int) -> Self:
        return cls._wrap(_Members(tuple(ranks), world_rank))

    def _with(self, ranks: Sequence[int]) -> Self:
        """Another group of processes of the same world; the empty one is always the same."""
        if not ranks:
            return type(self)(GROUP_EMPTY)
        return type(self)._of(ranks, self._h.world_rank)

    def Get_size(self) -> int:
        return len(self._ranks)

    def Get_rank(self) -> int:
        own = self._h.world_rank if self._ranks else -1
        return self._ranks.index(own) if own in self._ranks else k.UNDEFINED

    size = property(Get_size)
    rank = property(Get_rank)

    def Translate_ranks(self, ranks: Sequence[int] | None = None, group: Group | None = None) -> list[int]:
        mine, given = self._ranks, range(self.Get_size()) if ranks is None else ranks
        if group is None:
            return [mine[rank] if rank != k.PROC_NULL else rank for rank in given]
        theirs = {world: index for index, world in enumerate(group._ranks)}
        return [rank if rank == k.PROC_NULL else theirs.get(mine[rank], k.UNDEFINED) for rank in given]

    def Compare(self, group: Group) -> int:
        if self._ranks == group._ranks:
            return k.IDENT
        return k.SIMILAR if sorted(self._ranks) == sorted(group._ranks) else k.UNEQUAL

    def Dup(self) -> Self:
        return type(self)._wrap(_Members(self._ranks, self._h.world_rank))

    @classmethod
    def Union(cls, group1: Group, group2: Group) -> Self:
        more = [rank for rank in group2._ranks if rank not in set(group1._ranks)]
        base = group1 if group1._ranks else group2
        return cls(base._with((*group1._ranks, *more)))

    @classmethod
    def Intersection(cls, group1: Group, group2: Group) -> Self:
        return cls(group1._with([rank for rank in group1._ranks if rank in set(group2._ranks)]))

    Intersect = Intersection

    @classmethod
    def Difference(cls, group1: Group, group2: Group) -> Self:
        return cls(group1._with([rank for rank in group1._ranks if rank not in set(group2._ranks)]))

    def _at(self, ranks: Sequence[int]) -> list[int]:
        size = self.Get_size()
        wrong = [rank for rank in ranks if not 0 <= rank < size]
        if wrong or len(set(ranks)) != len(ranks):
            raise failure("ERR_RANK", f"ranks {list(ranks)} of a group of {size}")
        return [self._ranks[rank] for rank in ranks]

    def Incl(self, ranks: Sequence[int]) -> Self:
        return self._with(self._at(ranks))

    def Excl(self, ranks: Sequence[int]) -> Self:
        out = set(self._at(ranks))
        return self._with([rank for rank in self._ranks if rank not in out])

    def Range_incl(self, ranks: Sequence[tuple[int, int, int]]) -> Self:
        return self.Incl(list(_spread(ranks)))

    def Range_excl(self, ranks: Sequence[tuple[int, int, int]]) -> Self:
        return self.Excl(list(_spread(ranks)))

    @classmethod
    def Create_from_session_pset(cls, session: Any, pset_name: str) -> Self:
        return cls(session.Create_group(pset_name))

    def Free(self) -> None:
        _ = self._ranks
        self._h = None


def _spread(ranges: Sequence[tuple[int, int, int]]) -> Iterator[int]:
    for first, last, stride in ranges:
        yield from range(first, last + (1 if stride > 0 else -1), stride)


GROUP_EMPTY = Group._of((), -1)
GROUP_NULL = Group()
