"""Rows between hosts: flows of host groups, with times for their hops by rule.

For plans that are too large to be scheduled message by message. Algorithm:

1. Every route of a host group is a flow. A stream that fits into one message is a chunk as it is; others are cut
   (`stream`).
2. Hops get colours. Number givers and takers of hops. Hops whose taker is the same number ``r`` of places after the
   giver, around, are a *shift*; hops of one shift into one host are counted; shift and count are the colour. For
   traffic that is even between all pairs these are the cyclic shifts, and no host waits; otherwise it is nearly so.

Hops with one shift and one giver have one taker, so colours are distinct on either side. There are as many times in a
period as there are colours. The *lag* of a hop is how many hops come before it; its time is its colour, so many periods
later.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from remesh.layout import Box
from remesh.resharding.model.slices import IntArray, distinct
from remesh.resharding.schedule.chunks import Chunks, Cut, Part, PartRows, cut_streams, ends_of
from remesh.resharding.schedule.fusion import Fused
from remesh.resharding.schedule.rows import OWNED, Ends, Rows
from remesh.resharding.schedule.senders import Route
from remesh.resharding.schedule.trees import Hop

_ALMOST_ONE = 1 - 1e-9
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HostRows:
    """Rows between hosts, and what scheduling their messages in time wants to know of them."""

    untimed: Rows
    """The rows, before their hops have times."""
    num_periods: int
    """Chunks of the finest route."""
    _runs: Sequence[_FlowRun]
    _fused: Fused

    @cached_property
    def rows(self) -> Rows:
        """The rows, with times for their hops."""
        rows = self.untimed
        colour = colour_hops(rows.hop_giver, rows.hop_taker)
        period = int(colour.max(initial=0)) + 1
        return replace(rows, hop_time=_lags(rows.before) * period + colour, period=period)

    @property
    def sequence(self) -> list[int]:
        """The chunks in the order in which streams were cut."""
        ends = ends_of([len(run.givers) for run in self._runs])
        places = [
            np.arange(end, end + len(run.givers)) if run.place is None else run.place + end
            for run, end in zip(self._runs, ends, strict=False)
        ]
        sequence: list[int] = np.argsort(np.concatenate(places)).tolist()
        return sequence

    @property
    def progress(self) -> list[float]:
        """For each chunk how much of its route comes before it, from 0 to less than 1."""
        of_stream, found = self._fused.progress, []
        for run in self._runs:
            whole = of_stream[run.first_stream : run.first_stream + len(run.givers)]
            found += (whole if run.progress is None else run.progress).tolist()
        return found


def make_host_rows(
    fused: Fused, routes: Sequence[Sequence[Route]], host_of: Mapping[int, str], chunk_bytes: int
) -> HostRows:
    """The flows by which all streams travel; ``routes`` are those of each group."""
    drafts = _Drafts(fused, host_of)
    for group, of_group in enumerate(routes):
        drafts.add(group, of_group, chunk_bytes)
    return drafts.finish()


def compute_waiting(rows: Rows) -> float:
    """How long it takes if every flow goes in one piece, in the order of colours, over what the busiest host needs.

    1.0 for traffic that is even; for uneven traffic it grows with the time for which hosts wait for each other.
    """
    out, into, busy = ([0] * len(rows.hosts) for _ in range(3))
    total_in = list(busy)
    finish = 0
    order = np.argsort(rows.colour, kind="stable")
    hops = (column.take(order).tolist() for column in (rows.hop_giver, rows.hop_taker, rows.hop_bytes))
    for giver, taker, nbytes in zip(*hops, strict=True):
        if giver != taker:
            end = max(out[giver], into[taker]) + nbytes
            out[giver] = into[taker] = end
            busy[giver] += nbytes
            total_in[taker] += nbytes
            finish = max(finish, end)
    return finish / max(*busy, *total_in) if finish else 1.0


@dataclass(slots=True)
class _FlowRun:
    """Chunks of some flows that follow each other."""

    parts: PartRows
    first_part: IntArray
    givers: IntArray
    takers: IntArray
    place: IntArray | None
    """Which of them each was when streams were cut; None where they are in that order."""
    progress: _Floats | None
    """How much of its route comes before each; None where they are whole streams, of one route."""
    first_stream: int
    """The first of these, or the one that the first was cut from."""


@dataclass(frozen=True, slots=True)
class _Cuts:
    """How some streams are cut, wherever the boxes of their parts lie."""

    stream: list[int]
    """Of each chunk."""
    route: list[int]
    """Of each chunk."""
    first: IntArray
    """Where the pieces of each chunk begin, and the number of all."""
    progress: _Floats
    """For each chunk how much of its route comes before it, from 0 to less than 1."""
    pieces: PartRows
    """What chunks consist of: ``tensor`` is the row of the part that a piece is cut from, boxes are relative to it."""

    @classmethod
    def of(cls, cuts: Sequence[Cut], routes: Sequence[Route], ndims: Sequence[int], width: int) -> _Cuts:
        """These cuts of streams whose parts have their row for a tensor, of so many dims."""
        padded = (*ndims, width)  # the last one only sets the width
        pieces = PartRows.of([part for cut in cuts for part in cut.chunk.parts], padded)
        first = ends_of([len(cut.chunk.parts) for cut in cuts])
        passed = [0] * len(routes)
        progress = []
        for cut in cuts:
            route = routes[cut.route]
            progress.append(min(passed[cut.route] / (route.stop - route.start), _ALMOST_ONE))
            passed[cut.route] += cut.chunk.nbytes
        return cls([cut.stream for cut in cuts], [cut.route for cut in cuts], first, np.array(progress), pieces)

    def parts_of(self, parts: PartRows, chunks: IntArray) -> tuple[PartRows, IntArray]:
        """The parts of these chunks, cut from ``parts``, and where each chunk's begin."""
        counts = np.diff(self.first).take(chunks)
        ends = ends_of(counts)
        rows = np.arange(ends[-1]) + np.repeat(self.first.take(chunks) - ends[:-1], counts)
        pieces = self.pieces.take(rows)
        origin = parts.starts.take(pieces.tensor, axis=0)
        tensor = parts.tensor.take(pieces.tensor)
        # Dims that a tensor lacks are [0, 1) in both.
        return PartRows(tensor, origin + pieces.starts, origin + pieces.stops, pieces.nbytes, parts.ndims), ends


class _Drafts:
    """Flows that are being collected, group after group."""

    def __init__(self, fused: Fused, host_of: Mapping[int, str]) -> None:
        self._fused = fused
        self._host_of = host_of
        self._hosts = tuple(sorted(set(host_of.values())))
        self._number_of = {host: number for number, host in enumerate(self._hosts)}
        self._hosts_of_set: dict[int, frozenset[str]] = {}
        self._runs: list[_FlowRun] = []
        self._cuts: dict[tuple[object, ...], _Cuts] = {}
        """By all that matters of the streams that were cut."""
        self._whole = [0, 0]
        """Streams that are chunks as they are and wait to become a run: from, up to."""
        self._num_chunks: list[int] = []
        self._num_periods = 1
        self._hops: list[tuple[Hop, ...]] = []
        """Hops of each flow."""
        self._first_stream: list[int] = fused.first_stream.tolist()
        self._largest = (
            np.maximum.reduceat(fused.stream_bytes, fused.first_stream[:-1]).tolist() if fused.groups else []
        )
        # Receivers that are owners too differ from stream to stream, and flows with them.
        self._overlaps = not self._all_hosts(fused.givers).isdisjoint(self._all_hosts(fused.takers))

    def add(self, group: int, routes: Sequence[Route], chunk_bytes: int) -> None:
        """The flows of one more group."""
        low, high = self._first_stream[group], self._first_stream[group + 1]
        beside = set(self._beside(group)) if self._overlaps else {frozenset[str]()}
        if len(routes) > 1 or self._largest[group] > chunk_bytes or len(beside) > 1:
            self._cut(group, routes, chunk_bytes)
            return
        if self._whole[1] != low:
            self._flush()
            self._whole[0] = low
        self._whole[1] = high
        self._num_chunks.append(high - low)
        self._num_periods = max(self._num_periods, high - low)
        self._hops.append(_with_local(routes[0].hops, *beside))

    def finish(self) -> HostRows:
        """All of them."""
        self._flush()
        fused, number_of = self._fused, self._number_of
        giver = np.array([number_of[hop.giver] for hops in self._hops for hop in hops], dtype=np.int64)
        taker = np.array([number_of[hop.taker] for hops in self._hops for hop in hops], dtype=np.int64)
        empty = fused.givers[:0]
        runs = self._runs or [_FlowRun(fused.parts.take(empty), ends_of(()), empty, empty, None, None, 0)]
        givers, takers = (np.concatenate(sides) for sides in zip(*((r.givers, r.takers) for r in runs), strict=True))
        used, places = distinct(np.concatenate((givers, takers)), len(fused.rank_sets))
        first_part = ends_of(np.concatenate([np.diff(run.first_part) for run in runs]))
        made = Rows(
            host_of=self._host_of,
            ends=Ends.HOSTS,
            chunks=Chunks(PartRows.joined([run.parts for run in runs]), first_part),
            rank_sets=tuple(fused.rank_sets[number] for number in used.tolist()),
            givers=places[: len(givers)],
            takers=places[len(givers) :],
            first_chunk=ends_of(self._num_chunks),
            first_hop=ends_of([len(hops) for hops in self._hops]),
            hop_giver=giver,
            hop_taker=taker,
            hop_time=np.zeros(len(giver), dtype=np.int64),
            period=1,
        )
        return HostRows(made, self._num_periods, runs, fused)

    def _flush(self) -> None:
        low, high = self._whole
        self._whole = [0, 0]
        if low == high:
            return
        fused = self._fused
        first, last = int(fused.first_part[low]), int(fused.first_part[high])
        parts = fused.parts
        if (first, last) != (0, len(parts)):
            parts = parts.take(np.arange(first, last))
        first_part = fused.first_part[low : high + 1] - first
        sides = fused.givers[low:high], fused.takers[low:high]
        self._runs.append(_FlowRun(parts, first_part, *sides, None, None, low))

    def _cut(self, group: int, routes: Sequence[Route], chunk_bytes: int) -> None:
        self._flush()
        fused = self._fused
        low, high = self._first_stream[group], self._first_stream[group + 1]
        first, last = int(fused.first_part[low]), int(fused.first_part[high])
        parts = fused.parts.take(np.arange(first, last))
        cuts = self._cuts_of(parts, fused.first_part[low : high + 1] - first, routes, chunk_bytes)
        local = self._beside(group)
        found: dict[tuple[int, frozenset[str]], list[int]] = {}
        for cut, (route, stream) in enumerate(zip(cuts.route, cuts.stream, strict=True)):
            found.setdefault((route, local[stream]), []).append(cut)
        for (route, beside), members in found.items():
            self._num_chunks.append(len(members))
            self._hops.append(_with_local(routes[route].hops, beside))
        order = np.array([cut for members in found.values() for cut in members], dtype=np.int64)
        streams = low + np.array(cuts.stream, dtype=np.int64).take(order)
        made, first_part = cuts.parts_of(parts, order)
        self._num_periods = max([self._num_periods, *np.bincount(cuts.route).tolist()])
        sides = fused.givers.take(streams), fused.takers.take(streams)
        self._runs.append(_FlowRun(made, first_part, *sides, order, cuts.progress[order], low))

    def _cuts_of(self, parts: PartRows, first_part: IntArray, routes: Sequence[Route], chunk_bytes: int) -> _Cuts:
        """How streams of these parts are cut. Groups whose streams look alike are many, and are cut once."""
        shapes = parts.stops - parts.starts
        ndims = np.array(parts.ndims, dtype=np.int64).take(parts.tensor)
        stops = tuple(route.stop for route in routes)
        key = (*(column.tobytes() for column in (shapes, ndims, parts.nbytes, first_part)), stops, chunk_bytes)
        if key not in self._cuts:
            rows = zip(shapes.tolist(), ndims.tolist(), parts.nbytes.tolist(), strict=True)
            alike = [Part(row, Box.of_shape(shape[:ndim]), n) for row, (shape, ndim, n) in enumerate(rows)]
            ends = first_part.tolist()
            streams = [alike[start:stop] for start, stop in itertools.pairwise(ends)]
            cuts = list(cut_streams(streams, routes, [chunk_bytes] * len(routes)))
            self._cuts[key] = _Cuts.of(cuts, routes, ndims.tolist(), parts.starts.shape[1])
        return self._cuts[key]

    def _beside(self, group: int) -> list[frozenset[str]]:
        """For each stream of a group the hosts on which takers sit beside an owner."""
        takers = self._fused.takers[self._first_stream[group] : self._first_stream[group + 1]]
        owners = self._fused.groups[group].owners
        return [self._hosts_of(number).intersection(owners) for number in takers.tolist()]

    def _hosts_of(self, rank_set: int) -> frozenset[str]:
        if rank_set not in self._hosts_of_set:
            self._hosts_of_set[rank_set] = frozenset(self._host_of[rank] for rank in self._fused.rank_sets[rank_set])
        return self._hosts_of_set[rank_set]

    def _all_hosts(self, sets: IntArray) -> set[str]:
        numbers = distinct(sets, len(self._fused.rank_sets))[0].tolist()
        return set().union(*(self._hosts_of(number) for number in numbers))


def _with_local(hops: tuple[Hop, ...], beside: frozenset[str]) -> tuple[Hop, ...]:
    """These hops, and those inside the hosts where takers sit beside an owner."""
    return (*hops, *(Hop(host, host) for host in sorted(beside)))


def _lags(before: IntArray) -> IntArray:
    """The number of hops before each hop, given which one comes right before; counted in doubling strides."""
    lag: IntArray = (before != OWNED).astype(np.int64)
    at = before.copy()
    while len(rows := np.flatnonzero(at != OWNED)):
        lag[rows] += lag[at[rows]]
        at[rows] = at[at[rows]]
    return lag


def colour_hops(giver: IntArray, taker: IntArray) -> IntArray:
    """Colours for hops between numbered hosts: distinct among the hops out of one, and among those into one.

    >>> colour_hops(np.array([0, 1, 1, 0]), np.array([2, 3, 2, 2])).tolist()
    [0, 0, 2, 1]
    """
    if not len(giver):
        return giver
    limit = int(max(giver.max(), taker.max())) + 1
    _, from_place = distinct(giver, limit)
    takers, to_place = distinct(taker, limit)
    count = len(takers)
    shift = (to_place - from_place) % count
    key = shift * count + to_place
    order = np.argsort(key, kind="stable")
    runs = np.flatnonzero(np.diff(key[order], prepend=-1))
    turn = np.empty(len(key), dtype=np.int64)
    turn[order] = np.arange(len(key)) - np.repeat(runs, np.diff(runs, append=len(key)))
    # A shift takes as many colours as its busiest host has hops.
    most = np.zeros(count, dtype=np.int64)
    np.maximum.at(most, shift, turn + 1)
    colours: IntArray = ends_of(most)[shift] + turn
    return colours
