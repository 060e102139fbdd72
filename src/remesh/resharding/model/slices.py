"""Slices of all moves as columns, with the sets of ranks at their ends, by number.

Definitions. A *rank set* is an ascending tuple of ranks; equal ones have one number, and numbers follow their order. A
*slice* (`remesh.layout.compute_overlap`) has *givers* that hold all of it and *takers* that want all of it. The takers
that do not hold it are *remote*, the others are *copiers*.

Algorithm:

1. Refine every distinct pair of layouts once, and number the rank sets of its atoms. A slice is then a row of numbers:
   however many ranks hold it, comparing two slices costs the same.
2. Which givers and takers share ranks? Ask each rank in which sets it is; all other pairs of sets are disjoint.
3. Elements are counted: slices are disjoint, so if they add up to what is wanted, nothing is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remesh.layout import Box, Layout, Overlap, Shard, compute_missing, compute_overlaps
from remesh.layout.box_array import BoxArray

IntArray = npt.NDArray[np.int64]
NOBODY = -1
"""Number of the empty rank set."""
_DENSE = 4
"""A table of all possible keys may be so many times longer than the column of keys."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The slices of one pair of layouts, whatever tensors have it."""

    starts: IntArray
    """First global index of each slice, ``[num_slices, ndim]``."""
    stops: IntArray
    """One past the last."""
    missing: tuple[Box, ...]
    """Boxes that are wanted and held by no rank."""
    sizes: IntArray
    """Elements of each slice."""
    givers: IntArray
    """Number of the rank set that holds it."""
    takers: IntArray
    """Number of the rank set that wants it."""
    remote: IntArray
    """Number of the set of takers that do not hold it."""
    copiers: IntArray
    """Number of the set of takers that hold it."""

    def boxes(self, rows: IntArray | None = None) -> list[Box]:
        """Boxes of these slices, of all of them by default."""
        starts, stops = (self.starts, self.stops) if rows is None else (self.starts[rows], self.stops[rows])
        return [Box(tuple(a), tuple(b)) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """The slices of some pairs of layouts."""

    blocks: tuple[Block, ...]
    """One for each distinct pair."""
    block_of: tuple[int, ...]
    """For each pair that was asked for the number of its block."""
    rank_sets: tuple[tuple[int, ...], ...]
    """Invariant: ascending and distinct."""


def compute_slices(pairs: Sequence[tuple[Layout, Layout, str]]) -> Slices:
    """The slices of these pairs of source, destination and name; layouts that are one object are refined once."""
    number_of: dict[tuple[int, int], int] = {}
    block_of = tuple(number_of.setdefault((id(src), id(dst)), len(number_of)) for src, dst, _ in pairs)
    # Of equal pairs the first one lends its name to errors.
    different = dict(zip(reversed(block_of), reversed(pairs), strict=True))
    refined = _Refined.of([different[number] for number in range(len(number_of))])
    numbers, columns = refined.numbers, [refined.givers, refined.takers, *refined.split_takers()]
    # By value, so that numbers do not depend on what was met first.
    order = sorted(range(len(numbers.members)), key=numbers.members.__getitem__)
    place = np.empty(len(order) + 1, dtype=np.int64)
    place[order] = np.arange(len(order))
    place[NOBODY] = NOBODY
    columns = [refined.sizes, *(place.take(column) for column in columns)]
    blocks = tuple(
        Block(overlap.starts, overlap.stops, missing, *(column[low:high] for column in columns))
        for overlap, missing, low, high in zip(
            refined.overlaps, refined.missing, refined.ends, refined.ends[1:], strict=False
        )
    )
    return Slices(blocks, block_of, tuple(numbers.members[number] for number in order))


def distinct(keys: IntArray, limit: int) -> tuple[IntArray, IntArray]:
    """Distinct keys, ascending, and the place of each key among them; keys are at least 0 and below ``limit``."""
    if limit > _DENSE * len(keys) + 1024:
        # numpy.unique would do, but its first call imports numpy.ma, which takes longer than a small plan.
        order = np.argsort(keys, kind="stable")
        found, first = runs_of(keys[order])
        place = np.empty(len(keys), dtype=np.int64)
        place[order] = np.repeat(np.arange(len(first)), np.diff(first, append=len(keys)))
        return found, place
    seen = np.zeros(limit, dtype=bool)
    seen[keys] = True
    found = np.flatnonzero(seen)
    places = np.empty(limit, dtype=np.int64)
    places[found] = np.arange(len(found))
    return found, places.take(keys)


def runs_of(keys: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct keys of ascending ones, and where the run of each begins."""
    first = np.flatnonzero(np.concatenate((np.ones(min(len(keys), 1), dtype=bool), keys[1:] != keys[:-1])))
    return keys[first], first


@dataclass(frozen=True, slots=True, eq=False)
class _Refined:
    """The slices of several pairs, one pair after the other."""

    overlaps: list[Overlap]
    missing: list[tuple[Box, ...]]
    ends: list[int]
    """Where the slices of each pair begin, and the number of all."""
    sizes: IntArray
    givers: IntArray
    takers: IntArray
    numbers: _Numbers
    """Of the rank sets that ``givers`` and ``takers`` count."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[Layout, Layout, str]]) -> _Refined:
        overlaps, numbers = compute_overlaps(pairs), _Numbers()
        ends = list(itertools.accumulate(map(len, overlaps), initial=0))
        sizes = _sizes_of([BoxArray(each.starts, each.stops) for each in overlaps])
        wanted = _sizes_of([each.dst.boxes for each in overlaps])
        wanted_ends = list(itertools.accumulate((len(each.dst) for each in overlaps), initial=0))
        is_whole = _sums(sizes, ends) == _sums(wanted, wanted_ends)
        return cls(
            overlaps,
            [() if whole else compute_missing(*pair) for pair, whole in zip(pairs, is_whole.tolist(), strict=True)],
            ends,
            sizes,
            _joined([numbers.of_atoms(each.src.shards).take(each.src_index) for each in overlaps]),
            _joined([numbers.of_atoms(each.dst.shards).take(each.dst_index) for each in overlaps]),
            numbers,
        )

    def split_takers(self) -> tuple[IntArray, IntArray]:
        """Remote takers and copiers of each slice."""
        remote = self.takers.copy()
        copiers = np.full(len(remote), NOBODY)
        shared = self._shared_pairs()
        if shared:
            base = len(self.numbers.members)
            keys = np.array([givers * base + takers for givers, takers in shared], dtype=np.int64)
            order = np.argsort(keys)
            sorted_keys, answers = keys[order], np.array(list(shared.values()), dtype=np.int64)[order]
            wanted = self.givers * base + self.takers
            at = np.minimum(np.searchsorted(sorted_keys, wanted), len(keys) - 1)
            hit = sorted_keys[at] == wanted
            remote[hit], copiers[hit] = answers[at[hit]].T
        return remote, copiers

    def _shared_pairs(self) -> dict[tuple[int, int], tuple[int, int]]:
        """The sets of remote takers and of copiers, for each pair of givers and takers that share ranks."""
        numbers = self.numbers
        sides: list[dict[int, list[int]]] = []
        for column in (self.givers, self.takers):
            sets_of: dict[int, list[int]] = {}
            for number in distinct(column, len(numbers.members))[0].tolist():
                for rank in numbers.members[number]:
                    sets_of.setdefault(rank, []).append(number)
            sides.append(sets_of)
        pairs = {(g, t) for rank in sides[0].keys() & sides[1].keys() for g in sides[0][rank] for t in sides[1][rank]}
        shared = {}
        for givers, takers in sorted(pairs):
            holders = set(numbers.members[givers])
            ranks = numbers.members[takers]
            remote = numbers.of(tuple(rank for rank in ranks if rank not in holders))
            shared[givers, takers] = (remote, numbers.of(tuple(rank for rank in ranks if rank in holders)))
        return shared


def _sizes_of(several: Sequence[BoxArray]) -> IntArray:
    """Elements of each box, one array after the other."""
    if len({boxes.ndim for boxes in several}) != 1:
        return _joined([boxes.sizes for boxes in several])
    return BoxArray(_joined([boxes.starts for boxes in several]), _joined([boxes.stops for boxes in several])).sizes


def _sums(values: IntArray, ends: Sequence[int]) -> IntArray:
    """What the values of each stretch add up to."""
    total = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(values)))[list(ends)]
    sums: IntArray = np.diff(total)
    return sums


def _joined(columns: Sequence[IntArray]) -> IntArray:
    if len(columns) == 1:
        return columns[0]
    return np.concatenate(columns) if columns else np.empty(0, dtype=np.int64)


class _Numbers:
    """Numbers for rank sets, in the order in which they are met."""

    def __init__(self) -> None:
        self.members: list[tuple[int, ...]] = []
        self._number_of: dict[tuple[int, ...], int] = {}
        self._of_atoms: dict[int, tuple[object, IntArray]] = {}

    def of(self, ranks: tuple[int, ...]) -> int:
        if not ranks:
            return NOBODY
        number = self._number_of.setdefault(ranks, len(self.members))
        if number == len(self.members):
            self.members.append(ranks)
        return number

    def of_atoms(self, atoms: tuple[tuple[Shard, ...], ...]) -> IntArray:
        """Numbers of the sets of holders; worked out once for a layout."""
        if id(atoms) not in self._of_atoms:
            # A rank may keep one box twice in its buffer, so ranks are made distinct.
            sets = [[shard.holder for shard in shards if isinstance(shard.holder, int)] for shards in atoms]
            column = [self.of(tuple(ranks) if len(ranks) < 2 else tuple(sorted(set(ranks)))) for ranks in sets]
            self._of_atoms[id(atoms)] = (atoms, np.array(column, dtype=np.int64))
        return self._of_atoms[id(atoms)][1]
