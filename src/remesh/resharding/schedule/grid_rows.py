"""Rows between grids, by one rule, without a list of all: each rank works out its own.

Where every piece is wanted within one host, no rank has to pass it on: a slice goes from a host that has it to the host
that wants it. If the sides are grids as well, a rank can work out its own slices, and when they go, without looking at
another rank's: a plan of 67 million slices costs it as much as the 16,000 that it takes part in.

Definitions. A *rank set* is all ranks that hold, or want, one piece. A *stream* is all that one set of givers has and
one set of takers wants, of all tensors; it travels as one chunk, whose number is that of the givers times the number of
sets of takers, plus that of the takers. A *share* is what a set has of one host. The hosts of either side are numbered,
and so are the shares of a host.

The rule: each stream is a flow of one chunk and one hop (`remesh.resharding.schedule.rows`). It comes from the share of
its givers that is on the host of its takers; where none is, shares take turns, by the numbers of the two sets added.
Its *shift* is how many numbers its taking host comes behind its giving host, around the larger number of hosts. Its
*turn* is the pair of numbers of its two shares among those of their hosts. The time of its hop goes by shift, then
turn.

*Why this is a schedule.* Out of one host only one other has a given shift, and into one host too; with the turn that
is one pair of shares, so one stream. So hops out of a host have distinct times, and hops into one too.

*Why it is complete.* Each side is a partition of every tensor, or there is no rule. An element then lies in one piece
of either side, so in one slice, so in one stream, and that comes once to each of its takers. Each rank has its own
rows checked when it works them out (`remesh.resharding.planning.check`).

For traffic that is even between hosts these are the rounds of an all-to-all exchange, in which no host waits. Where
each piece is held within one host, hosts carry exactly what they have to, whatever the traffic is, so the busiest one
is at the lower bound. Where replicas on several hosts take turns, the planner compares: `GridRows.loads` has both
sides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from remesh.layout import Box, Layout
from remesh.layout.box_array import BoxArray, GridJoin, find_pairs, join_grids, sum_over_boxes
from remesh.resharding.model.network import Network
from remesh.resharding.model.program import Copy
from remesh.resharding.model.slices import IntArray
from remesh.resharding.model.tasks import TensorMove
from remesh.resharding.schedule.chunks import Chunk, Chunks, ChunkTable, PartRows
from remesh.resharding.schedule.grid_sides import GridSide, SharedPieces, find_shared
from remesh.resharding.schedule.message_rows import Columns, MessageRows
from remesh.resharding.schedule.rows import Ends, Rows

_MAX_PARTS = 8
"""Parts that are kept, for ranks that are asked for."""
_SETS_AT_ONCE = 64
"""Sets of givers whose streams are made together when a reader goes through all."""


@dataclass(frozen=True, slots=True, eq=False)
class _LayoutPair:
    """All tensors with one pair of layouts."""

    src: Layout
    dst: Layout
    tensors: tuple[int, ...]
    """Their numbers among the moves, ascending."""
    element_bytes: int
    """What an element of all of them takes together."""
    join: GridJoin


@dataclass(frozen=True, slots=True)
class GridLoads:
    """Bytes that leave hosts, and come to them."""

    owned: Mapping[tuple[str, ...], int]
    """By the hosts that could have given them."""
    sent: Mapping[str, int]
    """By the host that gives them."""
    taken: Mapping[str, int]
    """By the host that wants them."""


@dataclass(frozen=True, eq=False)
class GridPart:
    """Some rows of a rule."""

    numbers: IntArray
    """For each chunk of the rows its number in the rule, ascending and distinct."""
    rows: Rows

    def row_of(self, number: int) -> int | None:
        """The row of a chunk's number; None if the chunk is not in this part."""
        row = int(np.searchsorted(self.numbers, number))
        return row if row < len(self.numbers) and self.numbers[row] == number else None

    def named(self, messages: Columns) -> Columns:
        """The messages of the rows, with chunks by the numbers of the rule."""
        return replace(messages, chunk=self.numbers[messages.chunk])


class GridRows(MessageRows):
    """The messages of a plan, by rule; made of what the plan moves alone."""

    def __init__(
        self,
        moves: tuple[TensorMove, ...],
        host_of: Mapping[int, str],
        sides: tuple[GridSide, GridSide],
        blocks: tuple[_LayoutPair, ...],
    ) -> None:
        self.moves = moves
        self.host_of = host_of
        self.givers, self.takers = sides
        self.chunks = _GridChunks(self)
        self._blocks = blocks
        self._parts: dict[tuple[str, int], GridPart] = {}

    @classmethod
    def of(
        cls,
        moves: tuple[TensorMove, ...],
        host_of: Mapping[int, str],
        *,
        more_than: int = -1,
        most_bytes: int | None = None,
    ) -> GridRows | None:
        """The rule for these moves; None where sides are no grids, or a piece is wanted on several hosts.

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
            blocks.append(_LayoutPair(src, dst, numbers, element_bytes, join))
        if sum(block.join.num_pairs * len(block.tensors) for block in blocks) <= more_than:
            return None
        givers = GridSide.of([move.src for move in moves], host_of)
        takers = None if givers is None else GridSide.of([move.dst for move in moves], host_of)
        if givers is None or takers is None or len(givers.rank_sets) * len(takers.rank_sets) <= more_than:
            return None
        if (takers.num_shares > 1).any():
            return None
        made = cls(moves, host_of, (givers, takers), tuple(blocks))
        return made if most_bytes is None or made.largest_bytes <= most_bytes else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GridRows):
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
    def has_replicas(self) -> bool:
        """Whether a piece is held on several hosts."""
        return bool((self.givers.num_shares > 1).any())

    @property
    def num_chunks(self) -> int:
        """Numbers for chunks; some belong to sets that share nothing."""
        return len(self.givers.rank_sets) * len(self.takers.rank_sets)

    @cached_property
    def num_messages(self) -> int:
        """Every stream comes once to each of its takers that do not hold it."""
        plain = self._plain_block
        if plain is None:
            return sum(int(self._num_remote(numbers).sum()) for numbers in self._all_streams())
        wanted = plain.join.met * self.takers.sizes[self.takers.sets_of[id(plain.dst)]]
        return int(wanted.sum()) - len(self._kept(plain).key)

    @cached_property
    def num_rounds(self) -> int:
        """Rounds that the rule has, whether or not anything goes in them."""
        return self._num_shifts * self._num_turns * self._num_steps

    @cached_property
    def loads(self) -> GridLoads:
        """What hosts send to others, and take from others; counted over pieces."""
        left = np.zeros(len(self.givers.rank_sets), dtype=np.int64)
        sent, taken = (np.zeros(len(side.hosts), dtype=np.int64) for side in (self.givers, self.takers))
        for block in self._blocks:
            sets, taker_sets = self.givers.sets_of[id(block.src)], self.takers.sets_of[id(block.dst)]
            dst = self.takers.by_host(block.dst, self._hosts)
            inside = find_shared(self.givers.by_host(block.src, self._hosts), dst)
            stays = inside.boxes.sizes * block.element_bytes
            np.add.at(left, sets, block.src.atoms.boxes.sizes * block.element_bytes)
            np.subtract.at(left, sets[inside.src], stays)
            np.add.at(taken, self.takers.host[taker_sets], dst.boxes.sizes * block.element_bytes)
            np.subtract.at(taken, self.takers.host[taker_sets[inside.dst]], stays)
            for share, nbytes in self._sent_in_turns(block):
                np.add.at(sent, self.givers.host[share], nbytes)
            np.subtract.at(sent, self.givers.host[self._share_in_turn(sets[inside.src], taker_sets[inside.dst])], stays)
        owned: dict[tuple[str, ...], int] = {}
        hosts = [self.givers.hosts[at] for at in self.givers.host.tolist()]
        for (first, stop), size in zip(
            itertools.pairwise(self.givers.first_share.tolist()), left.tolist(), strict=True
        ):
            owned[tuple(hosts[first:stop])] = owned.get(tuple(hosts[first:stop]), 0) + size
        named = [
            dict(zip(side.hosts, total.tolist(), strict=True))
            for side, total in ((self.givers, sent), (self.takers, taken))
        ]
        return GridLoads(owned, *named)

    def uplink_loads(self, network: Network) -> dict[tuple[str, str], int]:
        """Where each piece is held within one host, counted over pieces, rack after rack."""
        if self.has_replicas:
            return super().uplink_loads(network)
        racks = tuple(network.racks)
        number_of: dict[str | None, int] = {rack: number for number, rack in enumerate(racks)}
        # The last one stands for all hosts whose uplink is no limit.
        sent, taken = (np.zeros(len(number_of) + 1, dtype=np.int64) for _ in range(2))
        from_rack, to_rack = (
            np.array([number_of.get(network.rack_of(host), len(number_of)) for host in side.hosts], np.int64)[side.host]
            for side in (self.givers, self.takers)
        )
        for block in self._blocks:
            giving = from_rack[self.givers.sets_of[id(block.src)]]
            taking = to_rack[self.takers.sets_of[id(block.dst)]]
            for rack in sorted(set(taking.tolist())):
                wanted = (taking == rack).astype(np.int64)
                sizes = sum_over_boxes(block.src.atoms.boxes, block.dst.atoms.boxes, wanted)
                crossing = np.where(giving == rack, 0, sizes * block.element_bytes)
                np.add.at(sent, giving, crossing)
                taken[rack] += crossing.sum()
        ways = (("out", sent), ("in", taken))
        return {(rack, way): int(n[number]) for number, rack in enumerate(racks) for way, n in ways if n[number]}

    def _share_in_turn(self, givers: IntArray, takers: IntArray) -> IntArray:
        """The share that gives each stream where no share is on the takers' host."""
        share: IntArray = self.givers.first_share[givers] + (givers + takers) % self.givers.num_shares[givers]
        return share

    def _sent_in_turns(self, block: _LayoutPair) -> Iterator[tuple[IntArray, IntArray]]:
        """Shares, and the bytes of each if they took turns whoever wants them."""
        sets, takers = self.givers.sets_of[id(block.src)], self.takers.sets_of[id(block.dst)]
        boxes = block.src.atoms.boxes
        of_piece = self.givers.num_shares[sets]
        # Few pieces on very many hosts have fewer slices than turns.
        if block.join.num_pairs < len(takers) * of_piece.max(initial=0) and self.has_replicas:
            a, b = find_pairs(boxes, block.dst.atoms.boxes)
            slices = _shared_by(boxes, block.dst.atoms.boxes, a, b)
            yield self._share_in_turn(sets[a], takers[b]), slices.sizes * block.element_bytes
            return
        for num_shares in np.flatnonzero(np.bincount(of_piece)).tolist():
            pieces = np.flatnonzero(of_piece == num_shares)
            for turn in range(num_shares):
                sizes = boxes.sizes
                if num_shares > 1:
                    in_turn = (takers % num_shares == turn).astype(np.int64)
                    sizes = sum_over_boxes(boxes, block.dst.atoms.boxes, in_turn)
                share = self._share_in_turn(sets[pieces], np.full(len(pieces), turn))
                yield share, sizes[pieces] * block.element_bytes

    def bytes_taken(self) -> dict[int, int]:
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
        part = self.part_of(rank)
        gives, takes = map(part.named, part.rows.of_rank(rank))
        return gives, takes

    def part_of(self, rank: int) -> GridPart:
        """The rows of all chunks that a rank gives or takes; kept, for they will be asked for again."""
        return self._keep(("rank", rank), self.givers.of_rank.get(rank, ()), self.takers.of_rank.get(rank, ()))

    def part_with(self, number: int) -> GridPart:
        """Rows that have this chunk, if it goes anywhere."""
        known = next((part for part in self._parts.values() if part.row_of(number) is not None), None)
        givers = number // len(self.takers.rank_sets)
        return known or self._keep(("givers", givers), [givers], ())

    def chunk_bytes_of(self, rank: int) -> Mapping[int, int]:
        part = self.part_of(rank)
        return dict(zip(part.numbers.tolist(), part.rows.chunks.nbytes.tolist(), strict=True))

    def host_loads(self) -> dict[tuple[str, str], int]:
        sides = zip(("out", "in"), (self.loads.sent, self.loads.taken), strict=True)
        return dict(sorted(((host, way), nbytes) for way, load in sides for host, nbytes in load.items() if nbytes))

    def bytes_between_hosts(self) -> dict[tuple[str, str], int]:
        """Goes through all messages."""
        total: dict[tuple[str, str], int] = {}
        for (giver, taker), nbytes in self.bytes_by_pair().items():
            if (pair := (self.host_of[giver], self.host_of[taker]))[0] != pair[1]:
                total[pair] = total.get(pair, 0) + nbytes
        return total

    def blocks(self) -> Iterator[tuple[Columns, IntArray]]:
        """Some sets of givers at a time."""
        for first in range(0, len(self.givers.rank_sets), _SETS_AT_ONCE):
            part = self._make_part(range(first, min(first + _SETS_AT_ONCE, len(self.givers.rank_sets))), ())
            for columns, nbytes in part.rows.blocks():
                yield part.named(columns), nbytes

    @cached_property
    def _hosts(self) -> tuple[str, ...]:
        """All hosts, as rows number them."""
        return tuple(sorted(set(self.host_of.values())))

    @cached_property
    def _num_shifts(self) -> int:
        return max(len(self.givers.hosts), len(self.takers.hosts), 1)

    @cached_property
    def _num_turns(self) -> int:
        """Turns of a shift, and so many more that every shift has another entry first, where sets are largest."""
        num_turns = self.givers.num_places * self.takers.num_places
        return num_turns + (1 - num_turns) % max(map(len, self.takers.rank_sets), default=1)

    @cached_property
    def _num_steps(self) -> int:
        is_any_local = not set(self.givers.hosts).isdisjoint(self.takers.hosts)
        return max(map(len, self.takers.rank_sets), default=1) + is_any_local

    @cached_property
    def _shared(self) -> tuple[IntArray, IntArray]:
        """Streams whose givers and takers share ranks, ascending, and how many these are."""
        width = len(self.takers.rank_sets)
        both = self.givers.of_rank.keys() & self.takers.of_rank.keys()
        found = [g * width + t for rank in both for g in self.givers.of_rank[rank] for t in self.takers.of_rank[rank]]
        numbers, counts = np.unique(np.array(found, dtype=np.int64), return_counts=True)
        return numbers, counts

    def _num_remote(self, numbers: IntArray) -> IntArray:
        """Takers of each stream that do not hold it."""
        count: IntArray = self.takers.sizes[numbers % max(len(self.takers.sizes), 1)]
        shared, num_shared = self._shared
        if len(shared):
            at = np.minimum(np.searchsorted(shared, numbers), len(shared) - 1)
            count = count - np.where(shared[at] == numbers, num_shared[at], 0)
        return count

    @property
    def _plain_block(self) -> _LayoutPair | None:
        """The only pair of layouts, where each set keeps one piece of it, so that slices are streams."""
        if len(self._blocks) != 1 or len(self._blocks[0].tensors) != 1:
            return None
        (block,) = self._blocks
        num_pieces = len(block.src.atoms), len(block.dst.atoms)
        return block if num_pieces == (len(self.givers.rank_sets), len(self.takers.rank_sets)) else None

    def _kept(self, block: _LayoutPair) -> SharedPieces:
        """What ranks hold of what they want themselves."""
        return find_shared(self.givers.by_rank(block.src), self.takers.by_rank(block.dst))

    def _all_streams(self) -> Iterator[IntArray]:
        """Numbers of all streams, some sets of givers at a time."""
        for first in range(0, len(self.givers.rank_sets), _SETS_AT_ONCE):
            sets = range(first, min(first + _SETS_AT_ONCE, len(self.givers.rank_sets)))
            yield np.unique(np.concatenate([numbers for _, numbers, _ in self._slices(True, sets)]))

    def _slices(self, gives: bool, sets: Sequence[int]) -> Iterator[tuple[_LayoutPair, IntArray, BoxArray]]:
        """The slices of these sets of one side, block after block: numbers of their streams, and their boxes."""
        for block in self._blocks:
            boxes = [block.src.atoms.boxes, block.dst.atoms.boxes]
            columns = [self.givers.sets_of[id(block.src)], self.takers.sets_of[id(block.dst)]]
            mine = 0 if gives else 1
            rows = np.flatnonzero(np.isin(columns[mine], np.asarray(sets, dtype=np.int64)))
            boxes[mine] = BoxArray(boxes[mine].starts[rows], boxes[mine].stops[rows])
            columns[mine] = columns[mine][rows]
            a, b = find_pairs(boxes[0], boxes[1])
            numbers = columns[0][a] * len(self.takers.rank_sets) + columns[1][b]
            yield block, numbers, _shared_by(boxes[0], boxes[1], a, b)

    def _keep(self, key: tuple[str, int], held: Sequence[int], wanted: Sequence[int]) -> GridPart:
        if key not in self._parts:
            if len(self._parts) >= _MAX_PARTS:
                del self._parts[next(iter(self._parts))]
            self._parts[key] = self._make_part(held, wanted)
        return self._parts[key]

    def _make_part(self, held: Sequence[int], wanted: Sequence[int]) -> GridPart:
        """The rows of all streams of these sets of givers, and of these sets of takers."""
        ndims = tuple(move.src.ndim for move in self.moves)
        width = max(ndims, default=0)
        keys, parts = [np.empty(0, dtype=np.int64)], [PartRows.of((), ndims)]
        for gives, sets in ((True, held), (False, wanted)):
            for block, numbers, boxes in self._slices(gives, sets) if len(sets) else ():
                goes = self._num_remote(numbers) > 0
                if not gives:
                    goes &= ~np.isin(numbers // len(self.takers.rank_sets), np.asarray(held, dtype=np.int64))
                chosen = np.flatnonzero(goes)
                pad = ((0, 0), (0, width - boxes.ndim))
                starts = np.pad(boxes.starts[chosen], pad)
                stops = np.pad(boxes.stops[chosen], pad, constant_values=1)
                for tensor in block.tensors:
                    nbytes = boxes.sizes[chosen] * self.moves[tensor].src.itemsize_bytes
                    keys.append(numbers[chosen])
                    parts.append(PartRows(np.full(len(chosen), tensor), starts, stops, nbytes, ndims))
        key, rows = np.concatenate(keys), PartRows.joined(parts)
        itemsizes = np.array([move.src.itemsize_bytes for move in self.moves], dtype=np.int64)
        # Falling item sizes keep every part aligned in its message.
        order = np.lexsort((rows.tensor, -itemsizes.take(rows.tensor), key))
        numbers, first = np.unique(key[order], return_index=True)
        return GridPart(numbers, self._rows_of(numbers, Chunks(rows.take(order), np.append(first, len(order)))))

    def _share_of(self, givers: IntArray, takers: IntArray) -> IntArray:
        """The share that gives each stream."""
        number_of = {host: number for number, host in enumerate(self.givers.hosts)}
        known = np.array([number_of.get(host, -1) for host in self.takers.hosts], dtype=np.int64)
        near = self.givers.share_on(givers, known[self.takers.host[takers]])
        return np.where(near >= 0, near, self._share_in_turn(givers, takers))

    def _rows_of(self, numbers: IntArray, chunks: Chunks) -> Rows:
        """The rows of these streams, whose chunks these are."""
        givers, takers = np.divmod(numbers, max(len(self.takers.rank_sets), 1))
        share = self._share_of(givers, takers)
        shift = (self.takers.host[takers] - self.givers.host[share]) % self._num_shifts
        turn = self.givers.place[share] * self.takers.num_places + self.takers.place[takers]
        place_of = [np.searchsorted(self._hosts, side.hosts) for side in (self.givers, self.takers)]
        used = [np.unique(column, return_inverse=True) for column in (givers, takers)]
        rank_sets = [self.givers.rank_sets[at] for at in used[0][0].tolist()]
        taker_sets = [self.takers.rank_sets[at] for at in used[1][0].tolist()]
        to_sets = used[1][1]
        for row in np.flatnonzero(np.isin(numbers, self._shared[0])).tolist():
            holders = set(rank_sets[used[0][1][row]])
            taker_sets.append(tuple(rank for rank in taker_sets[to_sets[row]] if rank not in holders))
            to_sets[row] = len(taker_sets) - 1
        return Rows(
            host_of=self.host_of,
            ends=Ends.HOSTS,
            chunks=chunks,
            rank_sets=(*rank_sets, *taker_sets),
            givers=used[0][1],
            takers=to_sets + len(rank_sets),
            first_chunk=np.arange(len(numbers) + 1),
            first_hop=np.arange(len(numbers) + 1),
            hop_giver=place_of[0][self.givers.host[share]],
            hop_taker=place_of[1][self.takers.host[takers]],
            hop_time=shift * self._num_turns + turn,
            period=self._num_shifts * self._num_turns,
            least_steps=self._num_steps,
        )


def _shared_by(src: BoxArray, dst: BoxArray, a: IntArray, b: IntArray) -> BoxArray:
    """What pairs of boxes share, given by their numbers on either side."""
    starts = np.maximum(src.starts.take(a, axis=0), dst.starts.take(b, axis=0))
    return BoxArray(starts, np.minimum(src.stops.take(a, axis=0), dst.stops.take(b, axis=0)))


class _GridChunks(ChunkTable):
    """What messages of a rule carry, by number; a number that no rank sends has an empty chunk."""

    def __init__(self, rows: GridRows) -> None:
        self._rows = rows

    @property
    def largest_bytes(self) -> int:
        return self._rows.largest_bytes

    def __len__(self) -> int:
        return self._rows.num_chunks

    def chunk(self, number: int) -> Chunk:
        part = self._rows.part_with(number)
        row = part.row_of(number)
        return Chunk((), 0) if row is None else part.rows.chunks[row]
