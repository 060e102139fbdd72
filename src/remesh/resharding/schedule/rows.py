"""Rows that stand for many messages: runs of chunks that follow each other along the same hops.

A plan over a thousand hosts has millions of messages, and nearly all of them are alike. Kept as rows it is small, and
each rank makes its own messages when it asks for them. A plan whose messages were scheduled one by one has rows too: of
one chunk each, with hops between ranks.

Definitions. *Places* are what hops join: hosts, or single ranks (`Ends`). A *flow* is a run of chunks that all take the
same *hops*. Its hops reach every place on which its chunks are wanted, each once; a hop from a host to itself serves
takers beside an owner. Every hop has a *time*, later than that of the hop that brings its giver the chunks. Time goes
round in *periods* of so many times each: no two hops out of one place, and no two into one, have equal times but for
whole periods. A time is divided into *turns*, a turn into *steps*. A plan has as many periods as its longest flow has
chunks, so that relays work at the same time; where no host relays there is one, and all chunks of a flow take turns.

The rules by which rows become messages:

1. Chunk ``p`` of a flow of ``n`` begins in period ``p * num_periods // n``, in its turn among those that do. It crosses
   a hop so many times after the beginning of its period as the hop's time is, in step 0.
2. The *colour* of a hop is its time within a period. Of the ``m`` takers in the place, ascending, number
   ``(p + colour) % m`` is the *entry*. It takes the chunk from the entry of the hop before, or, where there is none,
   from the givers in the place, by the same rule.
3. In steps 1, 2, ... the entry gives to the next taker of the host, that one to the next, around to the last. On a hop
   from a host to itself the giver informs the entry in step 1, and so on.

So in one step a place has at most one message out and one in, whatever its ranks are, and who gives a chunk took it in
an earlier step. Both follow from what `remesh.resharding.planning.check` checks on the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

from remesh.resharding.model.slices import IntArray, distinct, runs_of
from remesh.resharding.schedule.chunks import Chunks, ends_of
from remesh.resharding.schedule.message_rows import Columns, MessageRows, loads_of

OWNED = -1
"""Stands for the hop before, where the giver has the chunk in its own memory."""
_MESSAGES_AT_ONCE = 1 << 20
_MAX_KEPT = 1 << 15
"""Up to this many messages are made once and kept, whoever asks for which of them."""


class Ends(Enum):
    """The places that hops join."""

    HOSTS = "hosts"
    """Which ranks of a host give and take follows from the rules."""
    RANKS = "ranks"
    """Every hop is a message of each chunk."""


@dataclass(frozen=True, eq=False)
class Rows(MessageRows):
    """The messages of a plan, or of some chunks of it, as rows that stand for many."""

    host_of: Mapping[int, str]
    ends: Ends
    chunks: Chunks
    """What messages carry, by flow, then in the order in which they go."""
    rank_sets: tuple[tuple[int, ...], ...]
    """Who gives and who takes. Invariant: each ascending and not empty."""
    givers: IntArray
    """For each chunk the number of the rank set that holds it."""
    takers: IntArray
    """For each chunk the number of the rank set that is to have it."""
    first_chunk: IntArray
    """Where the chunks of each flow begin, and the number of all, ``[num_flows + 1]``."""
    first_hop: IntArray
    """Where the hops of each flow begin, and the number of all, ``[num_flows + 1]``."""
    hop_giver: IntArray
    """Number of the place that sends."""
    hop_taker: IntArray
    """Number of the place that takes."""
    hop_time: IntArray
    """When in a period, or so many periods later. Invariant: modulo ``period`` distinct among the hops out of a place,
    and among those into a place."""
    period: int
    """Times in a period. Invariant: >= 1."""
    least_steps: int = 1
    """Steps of a turn at the least: where these rows are some of many, those that others need."""

    @classmethod
    def of_messages(cls, host_of: Mapping[int, str], chunks: Chunks, messages: Columns) -> Rows:
        """The rows of messages that were scheduled one by one: a flow for each chunk, a hop for each message."""
        gives: list[set[int]] = [set() for _ in range(len(chunks))]
        takes: list[set[int]] = [set() for _ in range(len(chunks))]
        columns = (messages.giver, messages.taker, messages.chunk)
        for giver, taker, chunk in zip(*(column.tolist() for column in columns), strict=True):
            gives[chunk].add(giver)
            takes[chunk].add(taker)
        owners = [tuple(sorted(gave - took)) for gave, took in zip(gives, takes, strict=True)]
        takers = [tuple(sorted(took)) for took in takes]
        rank_sets = sorted({*owners, *takers})
        number_of = {ranks: number for number, ranks in enumerate(rank_sets)}
        by_chunk = messages.take(np.lexsort((messages.taker, messages.round, messages.chunk)))
        ranks = np.array(sorted(host_of), dtype=np.int64)
        return cls(
            host_of=host_of,
            ends=Ends.RANKS,
            chunks=chunks,
            rank_sets=tuple(rank_sets),
            givers=np.array([number_of[each] for each in owners], dtype=np.int64),
            takers=np.array([number_of[each] for each in takers], dtype=np.int64),
            first_chunk=np.arange(len(chunks) + 1),
            first_hop=ends_of(np.bincount(messages.chunk, minlength=len(chunks))),
            hop_giver=np.searchsorted(ranks, by_chunk.giver),
            hop_taker=np.searchsorted(ranks, by_chunk.taker),
            hop_time=by_chunk.round,
            period=int(messages.round.max(initial=0)) + 1,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rows):
            return NotImplemented
        return self.chunks == other.chunks and all(
            np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
            for mine, theirs in ((getattr(self, name), getattr(other, name)) for name in (*_FACTS, *COLUMNS))
        )

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Names of all hosts, ascending."""
        return tuple(sorted(set(self.host_of.values())))

    @cached_property
    def place_of(self) -> Mapping[int, int]:
        """Number of the place of each rank: hosts in the order of their names, or ranks in theirs."""
        if self.ends is Ends.RANKS:
            return {rank: number for number, rank in enumerate(self.host_of)}
        number_of = {host: number for number, host in enumerate(self.hosts)}
        return {rank: number_of[host] for rank, host in self.host_of.items()}

    @cached_property
    def num_places(self) -> int:
        return len(self.host_of if self.ends is Ends.RANKS else self.hosts)

    @cached_property
    def num_chunks(self) -> IntArray:
        """Chunks of each flow."""
        return np.diff(self.first_chunk)

    @cached_property
    def flow_of_chunk(self) -> IntArray:
        """Number of the flow of each chunk."""
        return np.repeat(np.arange(len(self.num_chunks)), self.num_chunks)

    @cached_property
    def flow_of_hop(self) -> IntArray:
        """Number of the flow of each hop."""
        return np.repeat(np.arange(len(self.num_chunks)), np.diff(self.first_hop))

    @cached_property
    def before(self) -> IntArray:
        """The hop by which the giver of each hop got the chunk, or OWNED."""
        found = np.full(len(self.hop_giver), OWNED)
        if not len(found) or int(np.diff(self.first_hop).max(initial=0)) < 2:
            return found
        width = self.num_places
        crosses = np.flatnonzero(self.hop_giver != self.hop_taker)
        into = self.flow_of_hop[crosses] * width + self.hop_taker[crosses]
        order = np.argsort(into, kind="stable")
        if len(into):
            wanted = self.flow_of_hop * width + self.hop_giver
            at = np.minimum(np.searchsorted(into[order], wanted), len(into) - 1)
            hit = (into[order][at] == wanted) & (self.hop_giver != self.hop_taker)
            found[hit] = crosses[order][at[hit]]
        return found

    @cached_property
    def num_periods(self) -> int:
        """The number of chunks of the longest flow; 1 without relays, which are the reason for periods."""
        return int(self.num_chunks.max(initial=1)) if (self.before != OWNED).any() else 1

    @cached_property
    def num_turns(self) -> int:
        """Most chunks of a flow in a period."""
        return -(-int(self.num_chunks.max(initial=1)) // self.num_periods)

    @cached_property
    def colour(self) -> IntArray:
        """The time of each hop within a period."""
        return self.hop_time % self.period

    @cached_property
    def _seats(self) -> _Seats:
        return _Seats.of(self.rank_sets, self.place_of, self.num_places)

    @cached_property
    def num_steps(self) -> int:
        """Steps of a turn, enough for the most takers of a set on a place."""
        seats = self._seats
        used = np.zeros(len(self.rank_sets), dtype=bool)
        used[self.takers] = True
        most = int(seats.counts[used[seats.keys // seats.num_places]].max(initial=1)) if len(self.takers) else 1
        return max(self.least_steps, most + int((self.hop_giver == self.hop_taker).any()))

    @cached_property
    def num_messages(self) -> int:
        """Every chunk comes once to each of its takers."""
        return int(self._set_sizes.take(self.takers).sum())

    @cached_property
    def _set_sizes(self) -> IntArray:
        return np.array([len(ranks) for ranks in self.rank_sets], dtype=np.int64)

    @cached_property
    def hop_bytes(self) -> IntArray:
        """Bytes that cross each hop: those of its flow."""
        total = np.concatenate(([0], np.cumsum(self.chunks.nbytes)))
        of_flow = total[self.first_chunk[1:]] - total[self.first_chunk[:-1]]
        sizes: IntArray = of_flow.take(self.flow_of_hop)
        return sizes

    def chunk_bytes_of(self, rank: int) -> Sequence[int]:
        return self._chunk_bytes

    @cached_property
    def _chunk_bytes(self) -> list[int]:
        sizes: list[int] = self.chunks.nbytes.tolist()
        return sizes

    def host_loads(self) -> dict[tuple[str, str], int]:
        return loads_of(self.bytes_between_hosts())

    def bytes_between_hosts(self) -> dict[tuple[str, str], int]:
        """Counted on the hops."""
        width = len(self.hosts)
        giver, taker = self.hop_giver, self.hop_taker
        if self.ends is Ends.RANKS:
            number_of = {host: number for number, host in enumerate(self.hosts)}
            host = np.array([number_of[name] for name in self.host_of.values()], dtype=np.int64)
            giver, taker = host[giver], host[taker]
        keys, place = distinct(giver * width + taker, width * width)
        total = np.zeros(len(keys), dtype=np.int64)
        np.add.at(total, place, self.hop_bytes)
        pairs = (divmod(key, width) for key in keys.tolist())
        return {(self.hosts[a], self.hosts[b]): n for (a, b), n in zip(pairs, total.tolist(), strict=True) if a != b}

    def bytes_taken(self) -> dict[int, int]:
        of_set = np.zeros(len(self.rank_sets), dtype=np.int64)
        np.add.at(of_set, self.takers, self.chunks.nbytes)
        total: dict[int, int] = {}
        for ranks, nbytes in zip(self.rank_sets, of_set.tolist(), strict=True):
            for rank in ranks if nbytes else ():
                total[rank] = total.get(rank, 0) + nbytes
        return total

    def blocks(self) -> Iterator[tuple[Columns, IntArray]]:
        """Some flows at a time."""
        if self._are_few:
            yield self._all, self.chunks.nbytes[self._all.chunk]
            return
        ends = ends_of(self._set_sizes.take(self.takers))[self.first_chunk]
        low = 0
        while low < len(self.num_chunks):
            high = max(low + 1, int(np.searchsorted(ends, ends[low] + _MESSAGES_AT_ONCE, side="right")) - 1)
            chunks = np.arange(self.first_chunk[low], self.first_chunk[high])
            found = self._expand(*self.cross(chunks, np.arange(self.first_hop[low], self.first_hop[high])))
            yield found, self.chunks.nbytes[found.chunk]
            low = high

    @property
    def _are_few(self) -> bool:
        return self.num_messages <= _MAX_KEPT

    @cached_property
    def _all(self) -> Columns:
        """All messages; asked for where they are few."""
        return self._expand(*self.cross(np.arange(len(self.givers)), np.arange(len(self.hop_giver))))

    def of_rank(self, rank: int) -> tuple[Columns, Columns]:
        if self._are_few:
            every = self._all
            gives, takes = (every.take(np.flatnonzero(ends == rank)) for ends in (every.giver, every.taker))
            return gives.sorted(), takes.sorted()
        sets = self._sets_of.get(rank)
        if sets is None:
            return Columns.joined(()), Columns.joined(())
        place = self.place_of[rank]
        mine = np.flatnonzero(np.isin(self.takers, sets) | np.isin(self.givers, sets))
        near = self._expand(*self.cross(mine, np.flatnonzero(self.hop_taker == place)))
        far = self._expand(*self.cross(mine, np.flatnonzero((self.hop_giver == place) & (self.hop_taker != place))))
        given = [each.take(np.flatnonzero(each.giver == rank)) for each in (near, far)]
        return Columns.joined(given).sorted(), near.take(np.flatnonzero(near.taker == rank)).sorted()

    @cached_property
    def num_rounds(self) -> int:
        """One more than the last round."""
        if self._are_few:
            return int(self._all.round.max(initial=-1)) + 1
        hops = np.flatnonzero(self.num_chunks.take(self.flow_of_hop) > 0)
        last = self._expand(self.first_chunk[1:].take(self.flow_of_hop[hops]) - 1, hops)
        return int(last.round.max(initial=-1)) + 1

    @cached_property
    def _sets_of(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, ranks in enumerate(self.rank_sets):
            for rank in ranks:
                found.setdefault(rank, []).append(number)
        return found

    def cross(self, chunks: IntArray, hops: IntArray) -> tuple[IntArray, IntArray]:
        """Every pair of these chunks with these hops of its flow; hops are ascending."""
        flows = self.flow_of_chunk[chunks]
        of_hop = self.flow_of_hop[hops]
        low = np.searchsorted(of_hop, flows, side="left")
        counts = np.searchsorted(of_hop, flows, side="right") - low
        rows = np.repeat(np.arange(len(chunks)), counts)
        members = np.arange(len(rows)) + np.repeat(low - (np.cumsum(counts) - counts), counts)
        return chunks[rows], hops[members]

    def _expand(self, chunk: IntArray, hop: IntArray) -> Columns:
        """The messages by which each of these chunks crosses the hop beside it, and goes on inside the taker's host."""
        flow = self.flow_of_hop[hop]
        number = chunk - self.first_chunk[flow]
        count = self.num_chunks[flow]
        period = number * self.num_periods // count
        turn = number - -(-period * count // self.num_periods)
        start = ((period * self.period + self.hop_time[hop]) * self.num_turns + turn) * self.num_steps
        seats, colour = self._seats, self.colour[hop]
        first, count = seats.find(self.takers[chunk], self.hop_taker[hop])
        entry = (number + colour) % count
        before = self.before[hop]
        owned = before == OWNED
        from_set = np.where(owned, self.givers[chunk], self.takers[chunk])
        from_first, from_count = seats.find(from_set, self.hop_giver[hop])
        offset = number + np.where(owned, colour, self.colour[before])
        giver = seats.ranks[from_first + offset % from_count]
        is_local = self.hop_giver[hop] == self.hop_taker[hop]
        far = np.flatnonzero(~is_local)
        # Inside the host: step s brings it to the taker so many places behind the entry.
        steps = count - 1 + is_local
        rows = np.repeat(np.arange(len(steps)), steps)
        step = np.arange(len(rows)) - np.repeat(np.cumsum(steps) - steps, steps) + 1
        at = (entry[rows] + step - is_local[rows]) % count[rows]
        behind = seats.ranks[first[rows] + (at - 1) % count[rows]]
        return Columns(
            np.concatenate((start[far], start[rows] + step)),
            np.concatenate((giver[far], np.where(is_local[rows] & (step == 1), giver[rows], behind))),
            np.concatenate((seats.ranks[first[far] + entry[far]], seats.ranks[first[rows] + at])),
            np.concatenate((chunk[far], chunk[rows])),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Seats:
    """The ranks of every set, by place."""

    ranks: IntArray
    """By set, then place, then rank."""
    keys: IntArray
    """Set and place of every run of ranks, as one number, ascending."""
    firsts: IntArray
    """Where each run begins."""
    counts: IntArray
    """How long it is."""
    num_places: int

    @classmethod
    def of(cls, rank_sets: Sequence[tuple[int, ...]], place_of: Mapping[int, int], num_places: int) -> _Seats:
        ranks = np.array([rank for each in rank_sets for rank in each], dtype=np.int64)
        place = np.array([place_of[rank] for each in rank_sets for rank in each], dtype=np.int64)
        key = np.repeat(np.arange(len(rank_sets)), [len(each) for each in rank_sets]) * num_places + place
        order = np.argsort(key, kind="stable")
        keys, firsts = runs_of(key[order])
        return cls(ranks[order], keys, firsts, np.diff(firsts, append=len(key)), num_places)

    def find(self, sets: IntArray, places: IntArray) -> tuple[IntArray, IntArray]:
        """The start and the number of the ranks of each set on the place given with it."""
        at = np.searchsorted(self.keys, sets * self.num_places + places)
        return self.firsts[at], self.counts[at]


COLUMNS = ("givers", "takers", "first_chunk", "first_hop", "hop_giver", "hop_taker", "hop_time")
"""Columns of rows, beside those of their chunks."""
_FACTS = ("host_of", "ends", "rank_sets", "period", "least_steps")


def columns_of(rows: Rows) -> tuple[IntArray, ...]:
    """The columns of rows, in the order of COLUMNS."""
    return tuple(getattr(rows, name) for name in COLUMNS)
