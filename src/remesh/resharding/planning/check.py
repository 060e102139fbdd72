"""Check of a plan, on its rows: what every plan has passed once, whatever planner made it.

What holds afterwards:

1. Names of tensors are distinct and ascending. Columns fit together; every number is in its range; rank sets are
   ascending, and no giver of a chunk takes it.
2. *Rounds.* Hops out of one place have distinct times but for whole periods, and so have hops into one. By the rules of
   `remesh.resharding.schedule.rows` two messages of one round then belong to one hop only if they belong to one chunk,
   and a chunk crosses a hop once, so in a round a rank gives at most one message and takes at most one.
3. *Order.* A hop is out of a place that gives from its own memory, or that an earlier hop of the flow has reached: its
   time is later, so its round is.
4. *Givers.* Every rank that may give a chunk holds each of its parts, and a rank that copies a box holds it. Ranks that
   keep the same boxes are asked once.
5. *Takers.* A flow reaches exactly the places of the takers of its chunks, each once; so a chunk comes to each of its
   takers once. Parts and copies lie inside what their takers want, no two chunks share an element, neither do two
   copies, nor what a rank copies and takes, and for each rank the sizes add up to all that it wants and any rank holds.

Rows that follow a rule (`remesh.resharding.schedule.grid_rows`) are made of moves and hosts alone, so they cannot be
damaged. Of a plan by rule its copies are checked when it is made, by all ranks alike; its rows are checked by each
rank, as above, when it works out its own: with everything that comes to that rank.

The check reads the two layouts, rows and copies only. It knows nothing of bounds, routes and streams, so a mistake in
the planner cannot hide in it. Tensors whose layouts are one object are looked at together: a model has thousands of
tensors and a few layouts.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout, compute_missing
from remesh.layout.box_array import BoxArray, find_pairs, is_disjoint
from remesh.resharding.model.program import Copy
from remesh.resharding.model.slices import IntArray, distinct, runs_of
from remesh.resharding.model.tasks import TensorMove
from remesh.resharding.schedule.chunks import Part, PartRows
from remesh.resharding.schedule.grid_rows import GridRows
from remesh.resharding.schedule.message_rows import MessageRows
from remesh.resharding.schedule.rows import OWNED, Rows

_DOING = "checking a reshard plan"
_LATEST = 1 << 40
_LAST_ROUND = 1 << 62


def check_plan(moves: Sequence[TensorMove], rows: MessageRows, copies: Sequence[Copy]) -> bool:
    """Raise `PlanError`, naming what is wrong, unless all that the module docstring lists holds.

    Returns whether every rank gets all that it wants; else some boxes are held by no rank.
    """
    for before, after in itertools.pairwise(moves):
        if before.name >= after.name:
            _refuse(f"tensor {after.name!r} comes after {before.name!r}, expected ascending names")
    if isinstance(rows, Rows):
        return _check_rows(moves, rows, copies)
    if not isinstance(rows, GridRows) or rows.moves != tuple(moves):
        _refuse("its messages follow a rule for other moves, expected the rule of this plan")
    _check_copies_of_rule(rows, copies)
    return True  # both sides are all of each tensor, or there were no such rows


def check_rank(rows: GridRows, copies: Sequence[Copy], rank: int) -> None:
    """Raise `PlanError` unless the rows that a rank has worked out are right, and bring it all that it wants.

    ``copies`` are those of the rank.
    """
    _check_rows(rows.moves, rows.part_of(rank).rows, copies, [rank])


def _check_rows(
    moves: Sequence[TensorMove], rows: Rows, copies: Sequence[Copy], ranks: Collection[int] | None = None
) -> bool:
    """``ranks`` are those of which rows and copies are complete; all by default. Whether these get all they want."""
    _check_copies(moves, copies)
    _check_columns(rows)
    _check_sets(rows)
    _check_hops(rows)
    _check_parts(moves, rows)
    _check_kept(moves, rows, copies)
    _check_disjoint(moves, rows, copies)
    return _check_totals(moves, rows, copies, ranks)


def _refuse(found: str) -> NoReturn:
    raise PlanError(f"{_DOING}: {found}; the plan is damaged, plan again")


def _check_copies_of_rule(rows: GridRows, copies: Sequence[Copy]) -> None:
    expected = tuple(rows.copies())
    for found, wanted in itertools.zip_longest(copies, expected):
        if found != wanted:
            _refuse(
                f"of its {len(copies)} copies one is {found}, expected {wanted}, one of {len(expected)} boxes that "
                "ranks hold of what they want"
            )


def _check_copies(moves: Sequence[TensorMove], copies: Sequence[Copy]) -> None:
    known: set[tuple[int, int]] = set()
    for copy in copies:
        if not 0 <= copy.tensor < len(moves):
            _refuse(f"a copy is of tensor number {copy.tensor}, expected 0 to {len(moves) - 1}")
        key = (id(copy.box), moves[copy.tensor].src.ndim)
        if key not in known and (copy.box.is_empty or copy.box.ndim != key[1]):
            _refuse(
                f"copy {copy.box} of tensor {moves[copy.tensor].name!r} is empty or has {copy.box.ndim} dims, expected "
                f"elements and {key[1]} dims"
            )
        known.add(key)
        if not copy.ranks or any(a >= b for a, b in itertools.pairwise(copy.ranks)):
            _refuse(f"copy of {copy.box} names ranks {copy.ranks}, expected distinct ascending ones")


def _check_columns(rows: Rows) -> None:
    num_chunks, num_flows, num_hops = len(rows.givers), len(rows.first_chunk) - 1, len(rows.hop_giver)
    for what, ends, count, total in (
        ("parts of chunks", rows.chunks.first_part, num_chunks, len(rows.chunks.parts)),
        ("chunks of flows", rows.first_chunk, num_flows, num_chunks),
        ("hops of flows", rows.first_hop, num_flows, num_hops),
    ):
        if len(ends) != count + 1 or not len(ends) or ends[0] != 0 or ends[-1] != total or (np.diff(ends) < 1).any():
            _refuse(f"the {what} are counted as {ends[-1] if len(ends) else 0}, expected {total} in {count} runs")
    num_sets, num_places = len(rows.rank_sets), rows.num_places
    for what, column, length, limit in (
        ("givers", rows.givers, num_chunks, num_sets),
        ("takers", rows.takers, num_chunks, num_sets),
        ("places that send", rows.hop_giver, num_hops, num_places),
        ("places that take", rows.hop_taker, num_hops, num_places),
        ("times", rows.hop_time, num_hops, _LATEST),
    ):
        if len(column) != length or (length and (column.min() < 0 or column.max() >= limit)):
            _refuse(f"there are {len(column)} {what}, expected {length} numbers from 0 to {limit - 1}")


def _check_sets(rows: Rows) -> None:
    for ranks in rows.rank_sets:
        if not ranks or any(a >= b for a, b in itertools.pairwise(ranks)) or not rows.host_of.keys() >= set(ranks):
            _refuse(f"a set of {len(ranks)} ranks is empty, or not ascending, or has a rank without a host")
    giving: dict[int, list[int]] = {}
    for number in distinct(rows.givers, len(rows.rank_sets))[0].tolist():
        for rank in rows.rank_sets[number]:
            giving.setdefault(rank, []).append(number)
    base = len(rows.rank_sets)
    clashing = {
        givers * base + takers
        for takers in distinct(rows.takers, base)[0].tolist()
        for rank in rows.rank_sets[takers]
        for givers in giving.get(rank, ())
    }
    if clashing and not clashing.isdisjoint(distinct(rows.givers * base + rows.takers, base * base)[0].tolist()):
        _refuse("a rank takes a chunk that it holds, expected that it copies it")


def _check_hops(rows: Rows) -> None:
    if not 1 <= rows.period <= _LATEST:
        _refuse(f"its periods have {rows.period} times, expected 1 to {_LATEST}")
    for what, side in (("out of", rows.hop_giver), ("into", rows.hop_taker)):
        if not _are_distinct(side * rows.period + rows.colour):
            _refuse(f"two hops {what} one place have the same time, expected at most one message in a round")
    if not _are_distinct(rows.flow_of_hop * rows.num_places + rows.hop_taker):
        _refuse("a flow has two hops into one place, expected each place once")
    relayed = np.flatnonzero(rows.before != OWNED)
    if len(relayed) and (rows.hop_time[relayed] <= rows.hop_time[rows.before[relayed]]).any():
        _refuse("a hop has no later time than the one that brings its giver the chunks, expected a later one")
    # Numbers of rounds have to fit into 64 bits.
    num_times = rows.num_periods * rows.period + int(rows.hop_time.max(initial=0))
    if num_times * rows.num_turns * rows.num_steps >= _LAST_ROUND:
        _refuse(f"it has {num_times} times of {rows.num_turns} turns, expected fewer than {_LAST_ROUND} rounds")
    # Of a set of places only its number matters from here on.
    number_of: dict[tuple[int, ...], int] = {}
    places_of_set = [tuple(sorted({rows.place_of[rank] for rank in ranks})) for ranks in rows.rank_sets]
    numbers = np.array([number_of.setdefault(places, len(number_of)) for places in places_of_set], dtype=np.int64)
    by_flow = np.lexsort((rows.hop_taker, rows.flow_of_hop))
    reached, ends = rows.hop_taker[by_flow].tolist(), rows.first_hop.tolist()
    expected = np.array([number_of.get(tuple(reached[a:b]), -1) for a, b in itertools.pairwise(ends)], dtype=np.int64)
    if (numbers[rows.takers] != expected[rows.flow_of_chunk]).any():
        _refuse("a flow does not reach the places on which its chunks are wanted, each once")
    _check_owners(rows, numbers, list(number_of))


def _check_owners(rows: Rows, numbers: IntArray, place_sets: Sequence[tuple[int, ...]]) -> None:
    """Hops that no other comes before are out of places on which every chunk of their flow has a giver."""
    chunk, root = rows.cross(np.arange(len(rows.givers)), np.flatnonzero(rows.before == OWNED))
    pairs = numbers[rows.givers[chunk]] * rows.num_places + rows.hop_giver[root]
    found = distinct(pairs, len(place_sets) * rows.num_places)[0].tolist()
    places_of = [frozenset(places) for places in place_sets]
    if not all(place in places_of[owners] for owners, place in (divmod(pair, rows.num_places) for pair in found)):
        _refuse("a hop is out of a place that neither holds the chunk nor took it before")


def _are_distinct(keys: IntArray) -> bool:
    ordered = np.sort(keys)
    return not (ordered[1:] == ordered[:-1]).any()


def _check_parts(moves: Sequence[TensorMove], rows: Rows) -> None:
    parts = rows.chunks.parts
    if parts.ndims != tuple(move.src.ndim for move in moves):
        _refuse(f"its parts are of {len(parts.ndims)} tensors, expected {len(moves)} with as many dims")
    width = max(parts.ndims, default=0)
    for what, column in (("start", parts.starts), ("stop", parts.stops)):
        if column.shape != (len(parts), width):
            _refuse(f"the {what}s of its parts have shape {column.shape}, expected {(len(parts), width)}")
    if len(parts) and (parts.tensor.min() < 0 or parts.tensor.max() >= len(moves)):
        _refuse(f"a part belongs to tensor number {parts.tensor.max()}, expected 0 to {len(moves) - 1}")
    bounds = np.array([(*m.src.global_shape, *(1,) * (width - m.src.ndim)) for m in moves]).reshape(len(moves), width)
    if (parts.starts < 0).any() or (parts.starts >= parts.stops).any() or (parts.stops > bounds[parts.tensor]).any():
        _refuse("a part is empty or reaches past its tensor")
    itemsizes = np.array([move.src.itemsize_bytes for move in moves], dtype=np.int64)[parts.tensor]
    if (parts.nbytes != BoxArray(parts.starts, parts.stops).sizes * itemsizes).any():
        _refuse("a part has other bytes than its box")
    rises = np.flatnonzero(np.diff(itemsizes) > 0) + 1
    if len(rises) and not np.isin(rises, rows.chunks.first_part).all():
        _refuse("item sizes rise inside a chunk, expected that every part begins aligned")


def _rows_of(parts: PartRows, kinds: Sequence[int]) -> dict[int, IntArray | slice]:
    """Rows of the parts of each kind of tensor that has any, in their order; ``kinds`` is by tensor."""
    kind_of = np.array(kinds, dtype=np.int64).take(parts.tensor)
    if not len(parts) or (kind_of == kind_of[0]).all():
        return {int(kind_of[0]): slice(None)} if len(parts) else {}
    order = np.argsort(kind_of, kind="stable")
    found, first = runs_of(kind_of[order])
    return dict(zip(found.tolist(), np.split(order, first[1:]), strict=True))


def _check_kept(moves: Sequence[TensorMove], rows: Rows, copies: Sequence[Copy]) -> None:
    """Every rank keeps what it gives and takes, and what it copies on both sides, each part in one shard."""
    others: dict[tuple[int, ...], int] = {}
    copied = np.array([others.setdefault(copy.ranks, len(rows.rank_sets) + len(others)) for copy in copies], np.int64)
    rank_sets = (*rows.rank_sets, *others)
    num_parts, per_chunk = len(rows.chunks.parts), np.diff(rows.chunks.first_part)
    boxes = PartRows.of([Part(copy.tensor, copy.box, 0) for copy in copies], rows.chunks.parts.ndims)
    parts = PartRows.joined([rows.chunks.parts, boxes] if copies else [rows.chunks.parts])
    for side, verb, sets in (("src", "gives", rows.givers), ("dst", "takes", rows.takers)):
        ends = np.concatenate((np.repeat(sets, per_chunk), copied))
        found = _KeptBoxes([getattr(move, side) for move in moves], rank_sets).find_lacking(parts, ends)
        if found is not None:
            part, ranks = parts.rows(found, found + 1)[0], rank_sets[int(ends[found])]
            what, keeps = verb if found < num_parts else "copies", "holds" if side == "src" else "wants"
            raise PlanError(
                f"{_DOING}: one of the ranks {ranks[:4]} ({len(ranks)} in all) {what} {part.box} of tensor "
                f"{moves[part.tensor].name!r}, expected that each {keeps} it in one shard; plan again"
            )


class _KeptBoxes:
    """Boxes that ranks keep of all tensors. Ranks that keep the same boxes of a layout are of one *kind*."""

    def __init__(self, layouts: Sequence[Layout], rank_sets: Sequence[tuple[int, ...]]) -> None:
        self._layouts = {id(layout): layout for layout in layouts}
        number_of = {key: number for number, key in enumerate(self._layouts)}
        self._distinct = list(self._layouts.values())
        self._layout_of = np.array([number_of[id(layout)] for layout in layouts], dtype=np.int64)
        """Number of the layout of each tensor."""
        self._rank_sets = rank_sets
        self._kinds: dict[tuple[int, tuple[Box, ...]], int] = {}
        """Numbers of kinds, by layout and boxes."""
        self._kind_of: dict[tuple[int, int], int] = {}
        """The kind of a rank in a layout."""

    def find_lacking(self, parts: PartRows, sets: IntArray) -> int | None:
        """The first part that not every rank of its set keeps in one box."""
        if not len(sets):
            return None
        pairs, place = distinct(
            self._layout_of[parts.tensor] * len(self._rank_sets) + sets, len(self._distinct) * len(self._rank_sets)
        )
        kinds = [self._kinds_of(*divmod(pair, len(self._rank_sets))) for pair in pairs.tolist()]
        width = parts.starts.shape[1]
        by_place = self._boxes(width).transpose(1, 2, 0)
        inside = np.ones(len(sets), dtype=bool)
        for turn in range(max(map(len, kinds), default=0)):
            kind = np.array([each[turn % len(each)] for each in kinds], dtype=np.int64)[place]
            found = np.zeros(len(sets), dtype=bool)
            for is_box, *ends in by_place:
                holds = is_box.take(kind) > 0
                for dim in range(width):
                    holds &= ends[dim].take(kind) <= parts.starts[:, dim]
                    holds &= ends[width + dim].take(kind) >= parts.stops[:, dim]
                found |= holds
            inside &= found
        return None if inside.all() else int(np.argmin(inside))

    def _kinds_of(self, layout: int, rank_set: int) -> list[int]:
        found = set()
        for rank in self._rank_sets[rank_set]:
            kind = self._kind_of.get((layout, rank))
            if kind is None:
                boxes = tuple(shard.box for shard in self._distinct[layout].shards_of(rank))
                if len(boxes) > 1:
                    boxes = tuple(sorted(set(boxes)))
                kind = self._kinds.setdefault((layout, boxes), len(self._kinds))
                self._kind_of[layout, rank] = kind
            found.add(kind)
        return sorted(found)

    def _boxes(self, width: int) -> IntArray:
        """Boxes of each kind, ``[kind, which of its boxes, 1 + 2 * width]``: 1 for a box, start and stop, padded."""
        most = max([1, *(len(boxes) for _, boxes in self._kinds)])
        none = (0,) * (1 + 2 * width)
        table = []
        for _, boxes in self._kinds:
            for box in boxes:
                fill = width - len(box.start)
                table.append((1, *box.start, *(0,) * fill, *box.stop, *(1,) * fill))
            table += [none] * (most - len(boxes))
        return np.array(table, dtype=np.int64).reshape(len(self._kinds), most, len(none))


def _by_tensor(copies: Sequence[Copy]) -> dict[int, list[Copy]]:
    found: dict[int, list[Copy]] = {}
    for copy in copies:
        found.setdefault(copy.tensor, []).append(copy)
    return found


def _check_disjoint(moves: Sequence[TensorMove], rows: Rows, copies: Sequence[Copy]) -> None:
    parts = rows.chunks.parts
    takers = np.repeat(rows.takers, np.diff(rows.chunks.first_part))
    copied = _by_tensor(copies)
    known: set[tuple[object, ...]] = set()
    for tensor, at in _rows_of(parts, range(len(moves))).items():
        here = copied.pop(tensor, [])
        travelling = BoxArray(parts.starts[at], parts.stops[at])
        # Copies of tensors with one pair of layouts share the objects of their boxes.
        columns = (travelling.starts, travelling.stops, takers[at])
        key = (*map(_digest_of, columns), *((id(copy.box), copy.ranks) for copy in here))
        if key not in known:
            _check_apart(moves[tensor], travelling, takers[at], rows.rank_sets, here)
            known.add(key)
    for tensor, here in copied.items():
        alike = tuple((id(copy.box), copy.ranks) for copy in here)
        if alike not in known:
            _check_apart(moves[tensor], BoxArray.of([], moves[tensor].src.ndim), takers[:0], rows.rank_sets, here)
            known.add(alike)


def _digest_of(column: IntArray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(column).data).digest()


def _check_apart(
    move: TensorMove,
    travelling: BoxArray,
    takers: IntArray,
    rank_sets: Sequence[tuple[int, ...]],
    copies: Sequence[Copy],
) -> None:
    """Check that chunks and copies share no elements, and that no rank receives what it copies locally."""
    ndim = move.src.ndim
    travelling = BoxArray(travelling.starts[:, :ndim], travelling.stops[:, :ndim])
    if len(travelling) and not is_disjoint(travelling):
        _refuse(f"two chunks share elements of tensor {move.name!r}, expected each element in one chunk")
    if not copies:
        return
    kept = BoxArray.of([copy.box for copy in copies], ndim)
    if not is_disjoint(kept):
        _refuse(f"two copies share elements of tensor {move.name!r}, expected each element once")
    for part, at in zip(*(side.tolist() for side in find_pairs(travelling, kept)), strict=True):
        twice = set(rank_sets[int(takers[part])]).intersection(copies[at].ranks)
        if twice:
            _refuse(f"rank {min(twice)} copies {copies[at].box} of tensor {move.name!r} and takes some of it as well")


def _check_totals(
    moves: Sequence[TensorMove], rows: Rows, copies: Sequence[Copy], ranks: Collection[int] | None
) -> bool:
    """Every rank gets as many elements as it wants and any rank holds; whether these are all that it wants."""
    parts = rows.chunks.parts
    base = len(rows.rank_sets)
    takers = np.repeat(rows.takers, np.diff(rows.chunks.first_part))
    keys, place = distinct(parts.tensor * base + takers, len(moves) * base)
    sizes = np.zeros(len(keys), dtype=np.int64)
    np.add.at(sizes, place, BoxArray(parts.starts, parts.stops).sizes)
    tensors, sets = np.divmod(keys, max(base, 1))
    ends = np.searchsorted(tensors, np.arange(len(moves) + 1)).tolist()
    copied = _by_tensor(copies)
    wanted: dict[int, dict[int, int]] = {}
    known: set[tuple[object, ...]] = set()
    is_complete = True
    for tensor, (move, low, high) in enumerate(zip(moves, ends, ends[1:], strict=False)):
        here = copied.get(tensor, [])
        what = [*((id(copy.box), copy.ranks) for copy in here), sets[low:high].tobytes(), sizes[low:high].tobytes()]
        key = (id(move.src), id(move.dst), *what)
        if key in known:
            continue
        known.add(key)
        got: dict[int, int] = {}
        taken = zip(sets[low:high].tolist(), sizes[low:high].tolist(), strict=True)
        several = [(rows.rank_sets[number], size) for number, size in taken]
        for of_set, size in (*several, *((copy.ranks, copy.box.size) for copy in here)):
            for rank in of_set:
                got[rank] = got.get(rank, 0) + size
        if id(move.dst) not in wanted:
            wanted[id(move.dst)] = _num_wanted(move.dst, ranks)
        is_complete &= got == wanted[id(move.dst)]
        _check_total(move, got, wanted[id(move.dst)], ranks)
    return is_complete


def _num_wanted(layout: Layout, ranks: Collection[int] | None) -> dict[int, int]:
    """Elements that each of these ranks wants, those wanted twice counted once."""
    wanted: dict[int, int] = {}
    if ranks is not None:
        layout = replace(layout, shards=tuple(shard for rank in ranks for shard in layout.shards_of(rank)))
    for size, shards in zip(layout.atoms.boxes.sizes.tolist(), layout.atoms.shards, strict=True):
        for rank in {int(shard.holder) for shard in shards}:
            wanted[rank] = wanted.get(rank, 0) + size
    return wanted


def _check_total(move: TensorMove, got: dict[int, int], wanted: dict[int, int], ranks: Collection[int] | None) -> None:
    for rank in sorted(wanted.keys() | got.keys()) if ranks is None and got != wanted else sorted(ranks or ()):
        expected = wanted.get(rank, 0)
        if got.get(rank, 0) != expected:
            mine = replace(move.dst, shards=move.dst.shards_of(rank))
            expected -= sum(box.size for box in compute_missing(move.src, mine, move.name))
        if got.get(rank, 0) != expected:
            raise PlanError(
                f"{_DOING}: rank {rank} gets {got.get(rank, 0)} elements of tensor {move.name!r}, expected the "
                f"{expected} that it wants, each once and none outside; plan again"
            )
