"""Sides of moves between grids: rank sets and their hosts, and what the two sides have in common.

A side knows its rank sets and their hosts. A *share* is what one rank set has of one host. What a rank, or a host,
holds of what it wants itself is found by joining the pieces of the two sides on that rank, or host: that costs as much
as there are pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from remesh.layout import Layout
from remesh.layout.box_array import BoxArray
from remesh.resharding.model.slices import IntArray
from remesh.resharding.schedule.chunks import ends_of


@dataclass(frozen=True, eq=False)
class GridSide:
    """One side of all moves: its rank sets, and where they are."""

    rank_sets: tuple[tuple[int, ...], ...]
    """Ascending and distinct; each ascending."""
    hosts: tuple[str, ...]
    """Hosts of this side, ascending."""
    first_share: IntArray
    """Where the shares of each set begin, ascending by host, and the number of all, ``[num_sets + 1]``."""
    host: IntArray
    """For each share the number of its host."""
    place: IntArray
    """For each share its number among those of its host."""
    sets_of: Mapping[int, IntArray]
    """By identity of a layout, the set that keeps each of its pieces, which are its atoms."""

    @classmethod
    def of(cls, layouts: Sequence[Layout], host_of: Mapping[int, str]) -> GridSide | None:
        """This side of moves; None where pieces do not tile their tensor."""
        by_layout: dict[int, list[tuple[int, ...]]] = {}
        for layout in layouts:
            if id(layout) not in by_layout:
                if not _is_tiled(layout):
                    return None
                by_layout[id(layout)] = [
                    tuple(sorted({int(shard.holder) for shard in shards})) for shards in layout.atoms.shards
                ]
        rank_sets = sorted({ranks for sets in by_layout.values() for ranks in sets})
        hosts_of_sets = [sorted({host_of[rank] for rank in ranks}) for ranks in rank_sets]
        names = [host for several in hosts_of_sets for host in several]
        hosts = tuple(sorted(set(names)))
        number_of = {name: number for number, name in enumerate(hosts)}
        host = np.array([number_of[name] for name in names], dtype=np.int64)
        order = np.argsort(host, kind="stable")
        place = np.empty_like(host)
        place[order] = np.arange(len(host)) - ends_of(np.bincount(host, minlength=len(hosts)))[host[order]]
        number = {ranks: at for at, ranks in enumerate(rank_sets)}
        columns = {key: np.array([number[ranks] for ranks in sets], np.int64) for key, sets in by_layout.items()}
        return cls(tuple(rank_sets), hosts, ends_of([len(each) for each in hosts_of_sets]), host, place, columns)

    @cached_property
    def sizes(self) -> IntArray:
        """Ranks of each set."""
        return np.array([len(ranks) for ranks in self.rank_sets], dtype=np.int64)

    @cached_property
    def num_shares(self) -> IntArray:
        """Hosts of each set."""
        return np.diff(self.first_share)

    def share_on(self, sets: IntArray, hosts: IntArray) -> IntArray:
        """The share of each set on the host given with it, by its number here; -1 where it has none."""
        set_of_share = np.repeat(np.arange(len(self.rank_sets)), self.num_shares)
        keys = set_of_share * len(self.hosts) + self.host
        wanted = sets * len(self.hosts) + hosts
        at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        return np.where((hosts >= 0) & (keys[at] == wanted), at, -1)

    @cached_property
    def num_places(self) -> int:
        """Most shares of a host."""
        return int(self.place.max(initial=0)) + 1

    @cached_property
    def of_rank(self) -> Mapping[int, list[int]]:
        """The sets of each rank, ascending."""
        found: dict[int, list[int]] = {}
        for number, ranks in enumerate(self.rank_sets):
            for rank in ranks:
                found.setdefault(rank, []).append(number)
        return found

    def by_rank(self, layout: Layout) -> Keyed:
        """Every piece of a layout once for each rank that keeps it."""
        sets = [self.rank_sets[number] for number in self.sets_of[id(layout)].tolist()]
        ranks = np.array([rank for each in sets for rank in each], dtype=np.int64)
        return Keyed(layout.atoms.boxes, np.repeat(np.arange(len(sets)), [len(each) for each in sets]), ranks)

    def by_host(self, layout: Layout, hosts: Sequence[str]) -> Keyed:
        """Every piece of a layout once for each of its hosts, by the number among these, which are ascending."""
        numbers = np.searchsorted(np.array(hosts), np.array(self.hosts)) if self.hosts else self.host
        sets = self.sets_of[id(layout)]
        counts = self.num_shares[sets]
        piece = np.repeat(np.arange(len(sets)), counts)
        share = np.arange(len(piece)) + np.repeat(self.first_share[sets] - ends_of(counts)[:-1], counts)
        return Keyed(layout.atoms.boxes, piece, numbers[self.host[share]])


def _is_tiled(layout: Layout) -> bool:
    """Whether its atoms, which are disjoint, are all of the tensor."""
    boxes = layout.atoms.boxes
    return bool((boxes.stops <= np.array(layout.global_shape)).all()) and int(boxes.sizes.sum()) == layout.size


@dataclass(frozen=True, slots=True, eq=False)
class SharedPieces:
    """Boxes that pieces of two sides share, where they have one key: a rank, or a host."""

    key: IntArray
    src: IntArray
    """Which piece of the source it is cut from."""
    dst: IntArray
    """Which piece of the destination."""
    boxes: BoxArray


@dataclass(frozen=True, slots=True, eq=False)
class Keyed:
    """Pieces of one side, each with the key to find it by; a piece may stand there several times."""

    boxes: BoxArray
    """All pieces of a layout."""
    piece: IntArray
    """Numbers of pieces."""
    key: IntArray
    """A key for each of these."""


def find_shared(src: Keyed, dst: Keyed) -> SharedPieces:
    """What pieces with equal keys share."""
    order = np.argsort(dst.key, kind="stable")
    keys = dst.key[order]
    low = np.searchsorted(keys, src.key, side="left")
    count = np.searchsorted(keys, src.key, side="right") - low
    rows = np.repeat(np.arange(len(count)), count)
    a = src.piece[rows]
    b = dst.piece[order[np.arange(len(rows)) + np.repeat(low - (np.cumsum(count) - count), count)]]
    starts = np.maximum(src.boxes.starts.take(a, axis=0), dst.boxes.starts.take(b, axis=0))
    stops = np.minimum(src.boxes.stops.take(a, axis=0), dst.boxes.stops.take(b, axis=0))
    keep = np.flatnonzero((starts < stops).all(axis=1))
    return SharedPieces(src.key[rows[keep]], a[keep], b[keep], BoxArray(starts[keep], stops[keep]))
