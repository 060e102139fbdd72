"""Topologies: who is whose neighbour. Arithmetic only.

A topology knows the neighbours of a rank, in MPI's order. Source: MPI 4.1, chapter 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from remesh.mpi.upper import constants as k
from remesh.mpi.upper.exceptions import failure

Edge = tuple[int, int, int]
"""Source, destination, weight."""


@dataclass(frozen=True)
class Cart:
    """A grid, row-major."""

    dims: tuple[int, ...]
    periods: tuple[bool, ...]
    kind = k.CART

    @classmethod
    def of(cls, dims: Sequence[int], periods: Sequence[bool] | bool | None) -> Self:
        """From MPI's arguments."""
        dims = [dims] if isinstance(dims, int) else list(dims)
        given = [bool(periods)] * len(dims) if isinstance(periods, (bool, int)) or periods is None else periods
        if len(given) != len(dims):
            raise ValueError(f"mismatch in {len(dims)} dims and {len(given)} periods")
        if any(n <= 0 for n in dims):
            raise failure("ERR_DIMS", f"dims {dims}")
        return cls(tuple(int(n) for n in dims), tuple(bool(p) for p in given))

    @property
    def num_ranks(self) -> int:
        num = 1
        for n in self.dims:
            num *= n
        return num

    def coords(self, rank: int) -> list[int]:
        """Where a rank is."""
        if not 0 <= rank < self.num_ranks:
            raise failure("ERR_RANK", f"rank {rank} of a grid {self.dims}")
        found = []
        for n in reversed(self.dims):
            found.append(rank % n)
            rank //= n
        return found[::-1]

    def rank(self, coords: Sequence[int]) -> int:
        """Who is there; PROC_NULL beyond a border that is not periodic."""
        rank = 0
        for n, periodic, at in zip(self.dims, self.periods, coords, strict=True):
            if not periodic and not 0 <= at < n:
                return k.PROC_NULL
            rank = rank * n + at % n
        return rank

    def shift(self, rank: int, direction: int, disp: int) -> tuple[int, int]:
        """Whom to receive from and send to, to move data by ``disp`` along a dimension."""
        if not 0 <= direction < len(self.dims):
            raise failure("ERR_DIMS", f"direction {direction} of {len(self.dims)} dimensions")
        here = self.coords(rank)

        def at(step: int) -> int:
            return self.rank([c + step if d == direction else c for d, c in enumerate(here)])

        return at(-disp), at(disp)

    def sources(self, rank: int) -> list[int]:
        """Neighbours in MPI's order: for each dimension the lower, then the upper one."""
        return [neighbour for d in range(len(self.dims)) for neighbour in self.shift(rank, d, 1)]

    destinations = sources

    @staticmethod
    def send_tag(index: int) -> int:
        """What is sent downwards arrives as what comes from above: tells both apart when they are one rank."""
        return index ^ 1


@dataclass(frozen=True)
class Graph:
    """Every rank's neighbours, known everywhere."""

    index: tuple[int, ...]  # of rank r: end of its neighbours in `edges`
    edges: tuple[int, ...]
    kind = k.GRAPH

    @classmethod
    def of(cls, index: Sequence[int], edges: Sequence[int]) -> Self:
        """From MPI's arguments; ``index`` may begin with a 0, as adjacency arrays do."""
        ends = tuple(map(int, index))
        if len(ends) > 1 and ends[0] == 0 and ends[-1] == len(edges):
            ends = ends[1:]
        return cls(ends, tuple(map(int, edges)))

    def sources(self, rank: int) -> list[int]:
        """Neighbours."""
        if not 0 <= rank < len(self.index):
            raise failure("ERR_RANK", f"rank {rank} of a graph of {len(self.index)}")
        return list(self.edges[self.index[rank - 1] if rank else 0 : self.index[rank]])

    destinations = sources

    @staticmethod
    def send_tag(index: int) -> int:
        """Messages between two ranks keep their order."""
        return 0


def _weights(given: Any, degree: int) -> tuple[int, ...] | None:
    if given is None or (isinstance(given, int) and given == k.UNWEIGHTED):
        return None
    weights = () if isinstance(given, int) and given == k.WEIGHTS_EMPTY else tuple(map(int, given))
    if len(weights) != degree:
        raise ValueError(f"{len(weights)} weights of {degree} edges")
    return weights


@dataclass(frozen=True)
class DistGraph:
    """This rank's own neighbours."""

    source_ranks: tuple[int, ...]
    destination_ranks: tuple[int, ...]
    source_weights: tuple[int, ...] | None  # None: unweighted
    destination_weights: tuple[int, ...] | None
    kind = k.DIST_GRAPH

    @classmethod
    def of(cls, sources: Sequence[int], destinations: Sequence[int], source_weights: Any, destweights: Any) -> Self:
        """From the arguments of MPI's adjacent constructor."""

        ranks = tuple(map(int, sources or ())), tuple(map(int, destinations or ()))
        return cls(*ranks, _weights(source_weights, len(ranks[0])), _weights(destweights, len(ranks[1])))

    @classmethod
    def from_edges(cls, edges: Sequence[Edge], rank: int, *, weighted: bool) -> Self:
        """This rank's part of all edges."""
        into = [edge for edge in edges if edge[1] == rank]
        out = [edge for edge in edges if edge[0] == rank]
        return cls(
            tuple(edge[0] for edge in into),
            tuple(edge[1] for edge in out),
            tuple(edge[2] for edge in into) if weighted else None,
            tuple(edge[2] for edge in out) if weighted else None,
        )

    def sources(self, rank: int) -> list[int]:
        """Those this rank receives from."""
        return list(self.source_ranks)

    def destinations(self, rank: int) -> list[int]:
        """Those this rank sends to."""
        return list(self.destination_ranks)

    @staticmethod
    def send_tag(index: int) -> int:
        """Messages between two ranks keep their order."""
        return 0


def edges_of(
    sources: Sequence[int], degrees: Sequence[int], destinations: Sequence[int], weights: Sequence[int] | None
) -> list[Edge]:
    """The edges that one rank names in MPI's general constructor."""
    edges = []
    position = 0
    for source, degree in zip(sources, degrees, strict=True):
        for _ in range(degree):
            edges.append((source, destinations[position], 1 if weights is None else weights[position]))
            position += 1
    return edges


def balanced_dims(num_ranks: int, dims: Sequence[int]) -> list[int]:
    """Fill the zeros of ``dims`` with factors of the number of ranks, as equal as can be, largest first.

    >>> balanced_dims(12, [0, 0])
    [4, 3]
    """
    left = num_ranks
    for n in dims:
        if n < 0:
            raise failure("ERR_DIMS", f"dims {list(dims)}")
        if n:
            if left % n:
                raise failure("ERR_DIMS", f"{num_ranks} ranks do not fill dims {list(dims)}")
            left //= n
    num_free = sum(1 for n in dims if not n)
    if not num_free:
        if left != 1:
            raise failure("ERR_DIMS", f"{num_ranks} ranks do not fill dims {list(dims)}")
        return list(dims)
    factors = iter(_best_factors(left, num_free))
    return [n or next(factors) for n in dims]


def _best_factors(number: int, num: int) -> list[int]:
    """``num`` factors of a number, descending, the largest as small as can be, then the next ..."""
    if num == 1:
        return [number]
    best: list[int] | None = None
    for first in range(1, number + 1):
        if number % first or first**num < number:
            continue
        rest = _best_factors(number // first, num - 1)
        if rest[0] <= first:
            best = [first, *rest]
            break
    return best if best is not None else [number] + [1] * (num - 1)
