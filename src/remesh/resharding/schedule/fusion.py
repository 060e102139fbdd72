"""Fusion of slices: streams of all tensors by their ranks, and groups of streams by their hosts.

Algorithm, on columns until the last step:

1. Slices of all tensors with equal givers and remote takers are one stream: equal pairs of numbers (`model.slices`).
2. Inside a stream falling item sizes keep every part aligned in its message; tensors stay in order.
3. Streams with equal owner and receiver hosts are one host group. The hosts of a rank set are looked up once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from remesh.resharding.model.bound import HostGroup
from remesh.resharding.model.slices import NOBODY, IntArray, Slices, distinct
from remesh.resharding.model.tasks import TensorMove
from remesh.resharding.schedule.chunks import Part, PartRows, SliceStream, ends_of


@dataclass(frozen=True)
class Fused:
    """All streams of a plan, as columns: by group, then givers, then takers."""

    groups: tuple[HostGroup, ...]
    """Ascending and distinct."""
    first_stream: IntArray
    """Where the streams of each group begin, and the number of all, ``[num_groups + 1]``."""
    givers: IntArray
    """For each stream the number of the rank set that gives it."""
    takers: IntArray
    """For each stream the number of the rank set that takes it."""
    first_part: IntArray
    """Where the parts of each stream begin, and the number of all, ``[num_streams + 1]``."""
    parts: PartRows
    """By stream, in the order in which they travel."""
    rows: IntArray
    """For each part the number of its slice in the block of its tensor."""
    slices: Slices
    """Whose rank sets ``givers`` and ``takers`` count."""

    @property
    def rank_sets(self) -> tuple[tuple[int, ...], ...]:
        """The rank sets that ``givers`` and ``takers`` count."""
        return self.slices.rank_sets

    @cached_property
    def stream_bytes(self) -> IntArray:
        """Bytes of each stream."""
        total = np.concatenate(([0], np.cumsum(self.parts.nbytes)))
        sizes: IntArray = total[self.first_part[1:]] - total[self.first_part[:-1]]
        return sizes

    @cached_property
    def progress(self) -> npt.NDArray[np.float64]:
        """For each stream how much of its group comes before it, from 0 to less than 1."""
        total = np.concatenate(([0], np.cumsum(self.stream_bytes)))
        counts = np.diff(self.first_stream)
        first, last = (np.repeat(total[ends], counts) for ends in (self.first_stream[:-1], self.first_stream[1:]))
        shares: npt.NDArray[np.float64] = (total[:-1] - first) / (last - first)
        return shares

    @cached_property
    def group_bytes(self) -> list[int]:
        """Bytes of each group."""
        total = np.concatenate(([0], np.cumsum(self.stream_bytes)))
        sizes: list[int] = (total[self.first_stream[1:]] - total[self.first_stream[:-1]]).tolist()
        return sizes

    @property
    def as_streams(self) -> list[SliceStream]:
        """The same as objects."""
        # Tensors of one layout share the objects of their boxes.
        boxes = [block.boxes() for block in self.slices.blocks]
        block_of = [boxes[number] for number in self.slices.block_of]
        columns = zip(self.parts.tensor.tolist(), self.rows.tolist(), self.parts.nbytes.tolist(), strict=True)
        parts = [Part(tensor, block_of[tensor][row], nbytes) for tensor, row, nbytes in columns]
        ends = self.first_part.tolist()
        rows = zip(self.givers.tolist(), self.takers.tolist(), self.stream_bytes.tolist(), ends, ends[1:], strict=False)
        return [SliceStream(self.rank_sets[g], self.rank_sets[t], parts[a:b], nbytes) for g, t, nbytes, a, b in rows]


def fuse(moves: Sequence[TensorMove], slices: Slices, host_of: Mapping[int, str]) -> Fused:
    """The streams of all slices that have remote takers."""
    givers, takers, rows, parts = _columns(moves, slices)
    base = len(slices.rank_sets) + 1
    keys, stream = distinct(givers * base + takers, base * base)
    itemsizes = np.array([move.src.itemsize_bytes for move in moves], dtype=np.int64)
    if len(set(itemsizes.tolist())) > 1:
        order = np.lexsort((-itemsizes.take(parts.tensor), stream))
    else:
        order = _stable_order(stream, len(keys))
    stream_givers, stream_takers = np.divmod(keys, base)
    groups, group = _group(stream_givers, stream_takers, slices.rank_sets, host_of)
    counts = np.bincount(stream, minlength=len(keys))
    by_group = _stable_order(group, len(groups))
    if not _is_range(by_group):
        # Parts go with their streams.
        old = ends_of(counts)
        counts = counts[by_group]
        new = ends_of(counts)
        order = order[np.arange(len(order)) + np.repeat(old[by_group] - new[:-1], counts)]
        stream_givers, stream_takers = stream_givers[by_group], stream_takers[by_group]
    return Fused(
        groups,
        ends_of(np.bincount(group, minlength=len(groups))),
        stream_givers,
        stream_takers,
        ends_of(counts),
        parts if _is_range(order) else parts.take(order),
        rows.take(order),
        slices,
    )


def _columns(moves: Sequence[TensorMove], slices: Slices) -> tuple[IntArray, IntArray, IntArray, PartRows]:
    """Givers, takers, number and part of every slice of every tensor that has remote takers."""
    ndims = tuple(move.src.ndim for move in moves)
    width = max(ndims, default=0)
    columns = []
    for block in slices.blocks:
        far = np.flatnonzero(block.remote != NOBODY)
        every = len(far) == len(block.remote)
        starts, stops, sizes, givers, takers = (
            column if every else column.take(far, axis=0)
            for column in (block.starts, block.stops, block.sizes, block.givers, block.remote)
        )
        if starts.shape[1] < width:
            pad = ((0, 0), (0, width - starts.shape[1]))
            starts, stops = np.pad(starts, pad), np.pad(stops, pad, constant_values=1)
        columns.append((starts, stops, sizes, givers, takers, far))
    several = [columns[number] for number in slices.block_of]
    if not several:
        none = np.empty(0, dtype=np.int64)
        return none, none, none, PartRows(none, none.reshape(0, 0), none.reshape(0, 0), none, ndims)
    starts, stops, sizes, givers, takers, rows = (
        column[0] if len(column) == 1 else np.concatenate(column) for column in zip(*several, strict=True)
    )
    counts = np.array([len(each[2]) for each in several], dtype=np.int64)
    itemsizes = np.array([move.src.itemsize_bytes for move in moves], dtype=np.int64)
    tensor = np.repeat(np.arange(len(moves)), counts)
    return givers, takers, rows, PartRows(tensor, starts, stops, sizes * np.repeat(itemsizes, counts), ndims)


def _group(
    givers: IntArray, takers: IntArray, rank_sets: Sequence[tuple[int, ...]], host_of: Mapping[int, str]
) -> tuple[tuple[HostGroup, ...], IntArray]:
    """The host groups, ascending, and for each stream the number of its group."""
    used = distinct(np.concatenate((givers, takers)), len(rank_sets))[0].tolist()
    hosts_of = {number: tuple(sorted({host_of[rank] for rank in rank_sets[number]})) for number in used}
    names = sorted(set(hosts_of.values()))
    number_of = {hosts: number for number, hosts in enumerate(names)}
    column = np.zeros(len(rank_sets), dtype=np.int64)
    column[used] = [number_of[hosts] for hosts in hosts_of.values()]
    base = len(names) + 1
    pairs, pair = distinct(column.take(givers) * base + column.take(takers), base * base)
    sides = [side.tolist() for side in np.divmod(pairs, base)]
    everyone = [set().union(*(names[number] for number in set(side))) for side in sides]
    if everyone[0].isdisjoint(everyone[1]):
        return tuple(HostGroup(names[a], names[b]) for a, b in zip(*sides, strict=True)), pair
    # Receivers that are owners too need nothing; pairs may become equal, and change places.
    far = []
    for a, b in zip(*sides, strict=True):
        own = set(names[a])
        far.append((names[a], tuple(host for host in names[b] if host not in own)))
    order = {key: number for number, key in enumerate(sorted(set(far)))}
    place = np.array([order[key] for key in far], dtype=np.int64)
    return tuple(HostGroup(*key) for key in order), place.take(pair)


def _stable_order(numbers: IntArray, limit: int) -> IntArray:
    # Sorting small numbers is done by counting.
    small = numbers.astype(np.uint16) if limit <= 1 << 16 else numbers
    order: IntArray = np.argsort(small, kind="stable")
    return order


def _is_range(order: IntArray) -> bool:
    return bool((order[1:] > order[:-1]).all())
