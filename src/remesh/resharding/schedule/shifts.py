"""Who sends what when, by rule? Cyclic shifts between hosts, for plans that nobody has to write down.

Where every piece of either side lies within one host, there is nothing to choose: a slice goes from the host that has
it to the host that wants it. If the sides are grids as well, a rank can work out its own slices, and when they go,
without looking at anybody else's: a plan of 67 million slices costs it as much as the 16,000 that it takes part in.

Definitions. A *rank set* is all who hold, or want, one piece. A *stream* is all that one set of givers has and one set
of takers wants, of all tensors; it travels as one chunk, whose number is that of the givers times the number of sets
of takers, plus that of the takers. The hosts of either side are numbered, and so are the sets of a host.

The rules by which a stream becomes messages:

1. Its *shift* is how many numbers its taking host comes behind its giving host, around the larger number of hosts. Its
   *turn* is the pair of numbers of its two sets among those of their hosts. Rounds go by shift, then turn, then *step*.
2. Of the ``m`` takers that do not hold it, ascending, number ``(shift + turn) % m`` is the *entry*; by the same rule
   one of the givers sends. It reaches the entry in step 0, or in step 1 if it stays inside the host.
3. In every further step the last one that took it gives it to the next taker, around.

*Why this is a schedule.* Out of one host only one other has a given shift, and into one host too; with the turn that
is one stream. So in step 0 a host has at most one message out and one in, and in every other step at most one inside:
the streams into a host that share a round are one. Who passes a stream on took it in the step before.

*Why it is complete.* Each side is checked to be a partition of every tensor. An element then lies in one piece of
either side, so in one slice, so in one stream, and that comes once to each of its takers.

For traffic that is even between hosts these are the rounds of an all-to-all exchange, in which nobody waits; whatever
the traffic is, hosts carry exactly what they have to, so the busiest one is at the lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from remesh.layout import Box, Layout
from remesh.layout.box_array import BoxArray, GridJoin, find_pairs, join_grids
from remesh.resharding.model.program import Copy
from remesh.resharding.model.slices import IntArray
from remesh.resharding.model.tasks import TensorMove
from remesh.resharding.schedule.compact import Columns
from remesh.resharding.schedule.parts import Chunks, PartRows
from remesh.resharding.schedule.shift_sides import Seating, SharedPieces, ShiftSide, find_shared

_MAX_TABLES = 16
"""Tables of chunks that are kept: two for each rank that somebody asks for."""
_SETS_AT_ONCE = 64
"""Sets of givers whose streams are made together when somebody goes through all."""


@dataclass(frozen=True, slots=True, eq=False)
class _ShiftBlock:
    """All tensors with one pair of layouts."""

    src: Layout
    dst: Layout
    tensors: tuple[int, ...]
    """Their numbers among the moves, ascending."""
    element_bytes: int
    """What an element of all of them takes together."""
    join: GridJoin


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """A table of some chunks of a rule."""

    numbers: IntArray
    """Ascending and distinct."""
    chunks: Chunks
    """The chunk of each number."""

    def row_of(self, number: int) -> int | None:
        """The row of a chunk's number; None if the chunk is not in this table."""
        row = int(np.searchsorted(self.numbers, number))
        return row if row < len(self.numbers) and self.numbers[row] == number else None

    def parts_of(self, numbers: IntArray) -> PartRows:
        """The parts of all these chunks, as far as they are here."""
        chosen = np.isin(self.numbers, numbers)
        return self.chunks.parts.take(np.flatnonzero(np.repeat(chosen, np.diff(self.chunks.first_part))))


class Shifts:
    """The messages of a plan, by rule; made of what the plan moves alone."""

    def __init__(
        self,
        moves: tuple[TensorMove, ...],
        host_of: Mapping[int, str],
        sides: tuple[ShiftSide, ShiftSide],
        blocks: tuple[_ShiftBlock, ...],
    ) -> None:
        self.moves = moves
        self.host_of = host_of
        self.givers, self.takers = sides
        self._blocks = blocks
        self._tables: dict[tuple[bool, tuple[int, ...]], ChunkTable] = {}

    @classmethod
    def of(
        cls,
        moves: tuple[TensorMove, ...],
        host_of: Mapping[int, str],
        *,
        more_than: int = -1,
        most_bytes: int | None = None,
    ) -> Shifts | None:
        """The rule for these moves; None where sides are no grids, or leave a choice of hosts.

        None also where there are no more than so many slices or streams, or a stream may have more bytes; most of that
        is seen before anything is worked out.
        """
        tensors: dict[tuple[int, int], list[int]] = {}
        for number, move in enumerate(moves):
            tensors.setdefault((id(move.src), id(move.dst)), []).append(number)
        pairs = [(moves[numbers[0]].src, moves[numbers[0]].dst, tuple(numbers)) for numbers in tensors.values()]
        if sum(len(src.atoms) * len(dst.atoms) * len(numbers) for src, dst, numbers in pairs) <= more_than:
            return None
        blocks = []
        for src, dst, numbers in pairs:
            join = join_grids(src.atoms.boxes, dst.atoms.boxes)
            if join is None:
                return None
            element_bytes = sum(moves[number].src.itemsize_bytes for number in numbers)
            if most_bytes is not None and join.largest * element_bytes > most_bytes:
                return None
            blocks.append(_ShiftBlock(src, dst, numbers, element_bytes, join))
        if sum(block.join.num_pairs * len(block.tensors) for block in blocks) <= more_than:
            return None
        givers = ShiftSide.of([move.src for move in moves], host_of)
        takers = None if givers is None else ShiftSide.of([move.dst for move in moves], host_of)
        if givers is None or takers is None or len(givers.rank_sets) * len(takers.rank_sets) <= more_than:
            return None
        made = cls(moves, host_of, (givers, takers), tuple(blocks))
        return made if most_bytes is None or made.largest_bytes <= most_bytes else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shifts):
            return NotImplemented
        return self.moves == other.moves and self.host_of == other.host_of

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def largest_bytes(self) -> int:
        """No stream has more bytes."""
        of_givers = np.zeros(len(self.givers.rank_sets), dtype=np.int64)
        for block in self._blocks:
            pieces = np.bincount(self.takers.sets_of[id(block.dst)]).max(initial=0)
            np.add.at(of_givers, self.givers.sets_of[id(block.src)], block.join.largest * block.element_bytes * pieces)
        return int(of_givers.max(initial=0))

    @property
    def num_chunks(self) -> int:
        """Numbers for chunks; some belong to sets that share nothing."""
        return len(self.givers.rank_sets) * len(self.takers.rank_sets)

    @cached_property
    def num_messages(self) -> int:
        """Every stream comes once to each of its takers that do not hold it."""
        counts = self._seats.takers_count
        plain = self._plain_block
        if plain is None:
            return sum(int(counts[self._remote(numbers)].sum()) for numbers, _ in self._all_streams())
        wanted = plain.join.met * counts[self.takers.sets_of[id(plain.dst)]]
        return int(wanted.sum()) - len(self._kept(plain).key)

    @cached_property
    def num_rounds(self) -> int:
        """Rounds that the rule has, whether or not anything goes in them."""
        return self._num_shifts * self._num_turns * self._num_steps

    @cached_property
    def loads(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes that each host sends to others, and that it takes from others."""
        sent, taken = (np.zeros(len(self._hosts), dtype=np.int64) for _ in range(2))
        for block in self._blocks:
            src, dst = self.givers.by_host(block.src, self._hosts), self.takers.by_host(block.dst, self._hosts)
            inside = find_shared(src, dst)
            for total, side in ((sent, src), (taken, dst)):
                np.add.at(total, side.key, side.boxes.sizes * block.element_bytes)
                np.subtract.at(total, inside.key, inside.boxes.sizes * block.element_bytes)
        named = [dict(zip(self._hosts, total.tolist(), strict=True)) for total in (sent, taken)]
        return named[0], named[1]

    @cached_property
    def bytes_taken(self) -> dict[int, int]:
        """Bytes that each rank takes, of those that take any."""
        total = np.zeros(max(self.takers.of_rank, default=-1) + 1, dtype=np.int64)
        for block in self._blocks:
            wanted, kept = self.takers.by_rank(block.dst), self._kept(block)
            np.add.at(total, wanted.key, wanted.boxes.sizes[wanted.piece] * block.element_bytes)
            np.subtract.at(total, kept.key, kept.boxes.sizes * block.element_bytes)
        return {rank: int(total[rank]) for rank in np.flatnonzero(total).tolist()}

    def copies(self) -> Iterator[Copy]:
        """Slices that their takers hold, by tensor."""
        found: dict[int, list[tuple[Box, tuple[int, ...]]]] = {}
        for block in self._blocks:
            kept = self._kept(block)
            by_slice: dict[tuple[int, int], tuple[int, list[int]]] = {}
            rows = zip(kept.src.tolist(), kept.dst.tolist(), kept.key.tolist(), strict=True)
            for row, (a, b, rank) in enumerate(rows):
                by_slice.setdefault((a, b), (row, []))[1].append(rank)
            made = [(kept.boxes.box(row), tuple(sorted(ranks))) for row, ranks in by_slice.values()]
            made.sort(key=lambda each: each[0].start)
            found.update(dict.fromkeys(block.tensors, made))
        for tensor in sorted(found):
            for box, ranks in found[tensor]:
                yield Copy(tensor, box, ranks)

    def of_rank(self, rank: int) -> tuple[Columns, Columns]:
        """What one rank gives, and what it takes, by round."""
        numbers = [table.numbers for table in self.tables_of(rank) if table is not None]
        mine = self.expand(np.unique(np.concatenate(numbers))) if numbers else Columns.joined(())
        gives, takes = (np.flatnonzero(column == rank) for column in (mine.giver, mine.taker))
        return mine.take(gives).sorted(), mine.take(takes).sorted()

    def tables_of(self, rank: int) -> tuple[ChunkTable | None, ChunkTable | None]:
        """The chunks that a rank holds, and those that it wants; None for a side that it is not on."""
        sides = ((True, self.givers), (False, self.takers))
        held, wanted = (
            self._table(gives, tuple(side.of_rank[rank])) if rank in side.of_rank else None for gives, side in sides
        )
        return held, wanted

    def table_with(self, number: int) -> ChunkTable:
        """A table that has this chunk, if its two sets share anything."""
        for table in self._tables.values():
            if table.row_of(number) is not None:
                return table
        return self._table(True, (number // len(self.takers.rank_sets),))

    def blocks(self) -> Iterator[tuple[Columns, IntArray]]:
        """All messages and the bytes of each, some sets of givers at a time, in no order that means anything."""
        for numbers, nbytes in self._all_streams():
            found = self.expand(numbers)
            yield found, nbytes[np.searchsorted(numbers, found.chunk)]

    def expand(self, numbers: IntArray) -> Columns:
        """The messages of these streams."""
        givers, takers = np.divmod(numbers, max(len(self.takers.rank_sets), 1))
        hosts = self.givers.host[givers], self.takers.host[takers]
        shift = (hosts[1] - hosts[0]) % self._num_shifts
        turn = self.givers.place[givers] * self.takers.num_places + self.takers.place[takers]
        is_local = self._numbers_of_hosts[0][hosts[0]] == self._numbers_of_hosts[1][hosts[1]]
        start = (shift * self._num_turns + turn) * self._num_steps + is_local
        seats, sets = self._seats, self._remote(numbers)
        sender = seats.ranks[seats.givers_first[givers] + (shift + turn) % seats.givers_count[givers]]
        first, count = seats.takers_first[sets], seats.takers_count[sets]
        rows = np.repeat(np.arange(len(numbers)), count)
        step = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
        at = (shift + turn)[rows] + step
        taker = seats.ranks[first[rows] + at % count[rows]]
        before = seats.ranks[first[rows] + (at - 1) % count[rows]]
        return Columns(start[rows] + step, np.where(step == 0, sender[rows], before), taker, numbers[rows])

    @cached_property
    def _hosts(self) -> tuple[str, ...]:
        return tuple(sorted({*self.givers.hosts, *self.takers.hosts}))

    @cached_property
    def _numbers_of_hosts(self) -> tuple[IntArray, IntArray]:
        """The numbers of the hosts of each side among the hosts of both sides."""
        number_of = {host: number for number, host in enumerate(self._hosts)}
        sides = [[number_of[host] for host in side.hosts] for side in (self.givers, self.takers)]
        return np.array(sides[0], dtype=np.int64), np.array(sides[1], dtype=np.int64)

    @cached_property
    def _num_shifts(self) -> int:
        return max(len(self.givers.hosts), len(self.takers.hosts), 1)

    @property
    def _num_turns(self) -> int:
        return self.givers.num_places * self.takers.num_places

    @cached_property
    def _num_steps(self) -> int:
        is_any_local = len(self._hosts) < len(self.givers.hosts) + len(self.takers.hosts)
        return max(map(len, self.takers.rank_sets), default=1) + is_any_local

    @cached_property
    def _seats(self) -> Seating:
        return Seating.of(self.givers, self.takers)

    @property
    def _plain_block(self) -> _ShiftBlock | None:
        """The only pair of layouts, where each set keeps one piece of it, so that slices are streams."""
        if len(self._blocks) != 1 or len(self._blocks[0].tensors) != 1:
            return None
        (block,) = self._blocks
        num_pieces = len(block.src.atoms), len(block.dst.atoms)
        return block if num_pieces == (len(self.givers.rank_sets), len(self.takers.rank_sets)) else None

    def _remote(self, numbers: IntArray) -> IntArray:
        """The set of takers of each stream that do not hold it."""
        seats = self._seats
        sets = numbers % max(len(self.takers.rank_sets), 1)
        if len(seats.shared):
            at = np.minimum(np.searchsorted(seats.shared, numbers), len(seats.shared) - 1)
            sets = np.where(seats.shared[at] == numbers, len(self.takers.rank_sets) + at, sets)
        return sets

    def _kept(self, block: _ShiftBlock) -> SharedPieces:
        """What ranks hold of what they want themselves."""
        return find_shared(self.givers.by_rank(block.src), self.takers.by_rank(block.dst))

    def _all_streams(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Numbers and bytes of all streams, some sets of givers at a time."""
        for first in range(0, len(self.givers.rank_sets), _SETS_AT_ONCE):
            sets = range(first, min(first + _SETS_AT_ONCE, len(self.givers.rank_sets)))
            found = [(key, boxes.sizes * block.element_bytes) for block, key, boxes in self._slices(True, sets)]
            keys, sizes = (np.concatenate(column) for column in zip(*found, strict=True))
            numbers, place = np.unique(keys, return_inverse=True)
            nbytes = np.zeros(len(numbers), dtype=np.int64)
            np.add.at(nbytes, place, sizes)
            yield numbers, nbytes

    def _slices(self, gives: bool, sets: Sequence[int]) -> Iterator[tuple[_ShiftBlock, IntArray, BoxArray]]:
        """The slices of these sets of one side, block after block: numbers of their streams, and their boxes."""
        for block in self._blocks:
            boxes = [block.src.atoms.boxes, block.dst.atoms.boxes]
            columns = [self.givers.sets_of[id(block.src)], self.takers.sets_of[id(block.dst)]]
            mine = 0 if gives else 1
            rows = np.flatnonzero(np.isin(columns[mine], np.asarray(sets, dtype=np.int64)))
            boxes[mine] = BoxArray(boxes[mine].starts[rows], boxes[mine].stops[rows])
            columns[mine] = columns[mine][rows]
            a, b = find_pairs(boxes[0], boxes[1])
            shared = BoxArray(
                np.maximum(boxes[0].starts.take(a, axis=0), boxes[1].starts.take(b, axis=0)),
                np.minimum(boxes[0].stops.take(a, axis=0), boxes[1].stops.take(b, axis=0)),
            )
            yield block, columns[0][a] * len(self.takers.rank_sets) + columns[1][b], shared

    def _table(self, gives: bool, sets: tuple[int, ...]) -> ChunkTable:
        """The chunks of these sets of one side; kept, for they will be asked for again."""
        if (gives, sets) not in self._tables:
            if len(self._tables) >= _MAX_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[gives, sets] = self._make_table(gives, sets)
        return self._tables[gives, sets]

    def _make_table(self, gives: bool, sets: tuple[int, ...]) -> ChunkTable:
        ndims = tuple(move.src.ndim for move in self.moves)
        width = max(ndims, default=0)
        none = np.empty(0, dtype=np.int64)
        keys, parts = [none], [PartRows.of((), ndims)]
        for block, numbers, boxes in self._slices(gives, sets):
            pad = ((0, 0), (0, width - boxes.ndim))
            starts, stops = np.pad(boxes.starts, pad), np.pad(boxes.stops, pad, constant_values=1)
            for tensor in block.tensors:
                nbytes = boxes.sizes * self.moves[tensor].src.itemsize_bytes
                keys.append(numbers)
                parts.append(PartRows(np.full(len(numbers), tensor), starts, stops, nbytes, ndims))
        key, rows = np.concatenate(keys), PartRows.joined(parts)
        itemsizes = np.array([move.src.itemsize_bytes for move in self.moves], dtype=np.int64)
        # Falling item sizes keep every part aligned in its message.
        order = np.lexsort((rows.tensor, -itemsizes.take(rows.tensor), key))
        numbers, first = np.unique(key[order], return_index=True)
        return ChunkTable(numbers, Chunks(rows.take(order), np.append(first, len(order))))
