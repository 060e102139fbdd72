"""Atoms of a set of shards: distinct, disjoint boxes, each with its holders.

Definitions. An *atom* is a box together with every shard that contains it; the atoms of a layout are disjoint
and cover exactly what its shards cover. Shards with equal boxes are replicas and make one atom. Only when
shards overlap partially (as in the union of two layouts) is there more to do.

Algorithm. (1) Group the shards by box; empty boxes drop out. (2) If the distinct boxes are disjoint, they are
the atoms. (3) Otherwise cut them: the cut points of every dim make a grid, and every box becomes the cells it
covers; cells with the same coordinates are one atom. (4) If that would make many more cells than there are
overlaps (boxes scattered without order), split box by box instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from remesh.layout.box import Box, are_in_a_row
from remesh.layout.box_array import BoxArray, find_pairs, is_disjoint
from remesh.layout.shard import Shard, holder_order

_FEW = 64
"""Up to this many boxes it is worth a look whether they follow each other."""
_CELLS_PER_OVERLAP = 8
"""Cutting along a grid may make this many cells per pair of overlapping boxes before it is thought a waste."""


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """Disjoint boxes and, for each, the shards that contain it."""

    boxes: BoxArray
    shards: tuple[tuple[Shard, ...], ...]
    """Per atom: every shard whose box contains it, by holder (ranks first). Invariant: never empty."""

    def __len__(self) -> int:
        return len(self.shards)


def compute_atoms(shards: Iterable[Shard], ndim: int) -> Atoms:
    """The atoms of these shards, all of them of a tensor with ``ndim`` dims."""
    groups: dict[Box, list[Shard]] = {}
    for shard in shards:
        groups.setdefault(shard.box, []).append(shard)
    boxes = [box for box in groups if not box.is_empty]
    array = BoxArray.of(boxes, ndim)
    kept = [groups[box] for box in boxes]
    if (len(boxes) <= _FEW and are_in_a_row(boxes)) or is_disjoint(array):
        return Atoms(array, tuple(_by_holder(group) for group in kept))
    pairs_a, pairs_b = find_pairs(array, array)
    refined = _refine_by_cuts(array, _CELLS_PER_OVERLAP * len(pairs_a))
    if refined is None:
        neighbours: list[list[int]] = [[] for _ in boxes]
        for a, b in zip(pairs_a.tolist(), pairs_b.tolist(), strict=True):
            if b < a:
                neighbours[a].append(b)
        refined = refine_by_splitting(boxes, neighbours, ndim)
    cells, owners = refined
    merged = tuple(_by_holder(shard for owner in each for shard in kept[owner]) for each in owners)
    return Atoms(cells, merged)


def refine_by_splitting(
    boxes: Sequence[Box], neighbours: Sequence[Sequence[int]], ndim: int
) -> tuple[BoxArray, list[tuple[int, ...]]]:
    """Disjoint pieces of overlapping boxes, each with the indices of the boxes that contain it.

    ``neighbours[i]`` lists the boxes before ``i`` that share elements with it. Box by box: pieces of earlier
    boxes that meet the new one are split in two, and the new box keeps what no earlier one has.
    """
    pieces: list[list[tuple[Box, tuple[int, ...]]]] = []
    for index, box in enumerate(boxes):
        rest = [box]
        for earlier in neighbours[index]:
            split: list[tuple[Box, tuple[int, ...]]] = []
            for piece, owners in pieces[earlier]:
                shared = piece.intersect(box)
                if shared is None:
                    split.append((piece, owners))
                    continue
                split.append((shared, (*owners, index)))
                split += [(part, owners) for part in piece.subtract(box)]
            pieces[earlier] = split
            rest = [part for each in rest for part in each.subtract(boxes[earlier])]
        pieces.append([(part, (index,)) for part in rest])
    flat = [piece for group in pieces for piece in group]
    return BoxArray.of([box for box, _ in flat], ndim), [owners for _, owners in flat]


def _refine_by_cuts(boxes: BoxArray, max_cells: int) -> tuple[BoxArray, list[tuple[int, ...]]] | None:
    """The same by cutting everything along one grid; None when that takes more than ``max_cells`` cells.

    Cells are counted with repetition, once for every box that covers them.
    """
    cuts = [np.unique(np.concatenate((boxes.starts[:, d], boxes.stops[:, d]))) for d in range(boxes.ndim)]
    low = np.stack([np.searchsorted(cut, boxes.starts[:, d]) for d, cut in enumerate(cuts)], axis=1)
    high = np.stack([np.searchsorted(cut, boxes.stops[:, d]) for d, cut in enumerate(cuts)], axis=1)
    span = high - low
    num_cells = np.prod(span.astype(np.float64), axis=1)
    if num_cells.sum() > max_cells or np.prod([float(len(cut)) for cut in cuts]) > 2.0**62:
        return None
    counts = num_cells.astype(np.int64)
    owner = np.repeat(np.arange(len(boxes)), counts)
    rest = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.empty((len(owner), boxes.ndim), dtype=np.int64)
    for dim in range(boxes.ndim - 1, -1, -1):
        rest, at = np.divmod(rest, span[owner, dim])
        places[:, dim] = low[owner, dim] + at
    cell = np.zeros(len(owner), dtype=np.int64)
    for dim, cut in enumerate(cuts):
        cell = cell * len(cut) + places[:, dim]
    order = np.argsort(cell, kind="stable")
    first = np.flatnonzero(np.diff(cell[order], prepend=-1))
    places = places[order[first]]
    starts = np.stack([cut[places[:, d]] for d, cut in enumerate(cuts)], axis=1)
    stops = np.stack([cut[places[:, d] + 1] for d, cut in enumerate(cuts)], axis=1)
    sorted_owner = owner[order].tolist()
    ends = [*first[1:].tolist(), len(sorted_owner)]
    owners = [tuple(sorted_owner[a:b]) for a, b in zip(first.tolist(), ends, strict=True)]
    return BoxArray(starts, stops), owners


def _by_holder(shards: Iterable[Shard]) -> tuple[Shard, ...]:
    group = tuple(shards)
    if len(group) < 2:
        return group
    return tuple(sorted(group, key=lambda s: (*holder_order(s.holder), s.addend, s.box, s.offset)))
