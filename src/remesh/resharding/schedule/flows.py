"""How does one row stand for many messages? Flows: chunks that follow each other along the same hops.

A plan over a thousand hosts has millions of messages, and nearly all of them are alike. Kept as *flows* it is small,
and each rank makes its own messages when it asks for them.

Definitions. A *flow* is a run of chunks that all take the same *hops* between hosts. Its hops reach every host on
which its chunks are wanted, each once; a hop from a host to itself serves takers beside an owner. The *lag* of a hop is
how many hops come before it. Hops of all flows have *colours*: no two hops out of one host, and no two into one host,
have the same. Time is divided into *periods*, periods into colours, colours into *turns*, turns into *steps*. There are
as many periods as the longest flow has chunks, so that relays work at the same time; where nobody relays there is one,
and all chunks of a flow take turns in it.

The rules by which rows become messages:

1. Chunk ``p`` of a flow of ``n`` begins in period ``p * num_periods // n``, in its turn among those that do. It crosses
   a hop of lag ``l`` so many periods later, in the time of the hop's colour, in step 0.
2. Of the ``m`` takers on the host, ascending, number ``(p + colour) % m`` is the *entry*. It takes the chunk from the
   entry of the hop before, or, where there is none, from the givers on the host, by the same rule.
3. In steps 1, 2, ... the entry gives to the next taker of the host, that one to the next, around to the last. On a hop
   from a host to itself the giver informs the entry in step 1, and so on.

So in one step a host has at most one message out and one in, whatever its ranks are, and who gives a chunk took it in
an earlier step. Both follow from what `remesh.resharding.planning.check_flows` checks on the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from remesh.resharding.model.slices import IntArray
from remesh.resharding.schedule.compact import Columns
from remesh.resharding.schedule.parts import Chunks

OWNED = -1
"""Stands for the hop before, where the giver has the chunk in its own memory."""
_MESSAGES_AT_ONCE = 1 << 20


@dataclass(frozen=True, eq=False)
class Flows:
    """The messages of a plan, as rows that stand for many."""

    host_of: Mapping[int, str]
    """Host of every rank."""
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
    hosts: tuple[str, ...]
    """Names of the hosts, which have numbers below. Invariant: all hosts of ``host_of``, ascending."""
    first_hop: IntArray
    """Where the hops of each flow begin, and the number of all, ``[num_flows + 1]``."""
    hop_giver: IntArray
    """Number of the host that sends."""
    hop_taker: IntArray
    """Number of the host that takes."""
    hop_colour: IntArray
    """When in a period. Invariant: distinct among the hops out of a host, and among those into a host."""

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
        width = len(self.hosts)
        crosses = np.flatnonzero(self.hop_giver != self.hop_taker)
        into = self.flow_of_hop[crosses] * width + self.hop_taker[crosses]
        order = np.argsort(into, kind="stable")
        found = np.full(len(self.hop_giver), OWNED)
        if len(into):
            wanted = self.flow_of_hop * width + self.hop_giver
            at = np.minimum(np.searchsorted(into[order], wanted), len(into) - 1)
            hit = (into[order][at] == wanted) & (self.hop_giver != self.hop_taker)
            found[hit] = crosses[order][at[hit]]
        return found

    @cached_property
    def lag(self) -> IntArray:
        """The number of hops before each hop; hops whose giver never gets the chunk have the largest number."""
        unknown = len(self.before)
        lag = np.where(self.before == OWNED, 0, unknown)
        for _ in range(int(np.diff(self.first_hop).max(initial=0))):
            rows = np.flatnonzero((lag == unknown) & (lag[self.before] != unknown))
            if not len(rows):
                break
            lag[rows] = lag[self.before[rows]] + 1
        return lag

    @cached_property
    def num_periods(self) -> int:
        """The number of chunks of the longest flow; 1 without relays, which are the reason for periods."""
        return int(self.num_chunks.max(initial=1)) if self.lag.any() else 1

    @cached_property
    def num_turns(self) -> int:
        """Most chunks of a flow in a period."""
        return -(-int(self.num_chunks.max(initial=1)) // self.num_periods)

    @cached_property
    def num_colours(self) -> int:
        """Colours of a period."""
        return int(self.hop_colour.max(initial=0)) + 1

    @cached_property
    def _seats(self) -> _Seats:
        return _Seats.of(self.rank_sets, self.host_of, self.hosts)

    @cached_property
    def num_steps(self) -> int:
        """Steps of a colour, enough for the most takers of a set on a host."""
        seats = self._seats
        used = np.zeros(len(self.rank_sets), dtype=bool)
        used[self.takers] = True
        most = int(seats.counts[used[seats.keys // seats.num_hosts]].max(initial=1)) if len(self.takers) else 1
        return most + int((self.hop_giver == self.hop_taker).any())

    @cached_property
    def num_messages(self) -> int:
        """Every chunk comes once to each of its takers."""
        sizes = np.array([len(ranks) for ranks in self.rank_sets], dtype=np.int64)
        return int(sizes.take(self.takers).sum())

    @cached_property
    def hop_bytes(self) -> IntArray:
        """Bytes that cross each hop: those of its flow."""
        total = np.concatenate(([0], np.cumsum(self.chunks.nbytes)))
        of_flow = total[self.first_chunk[1:]] - total[self.first_chunk[:-1]]
        sizes: IntArray = of_flow.take(self.flow_of_hop)
        return sizes

    def blocks(self) -> Iterator[Columns]:
        """All messages, some flows at a time, in no order that means anything."""
        sizes = np.array([len(ranks) for ranks in self.rank_sets], dtype=np.int64).take(self.takers)
        ends = np.concatenate(([0], np.cumsum(sizes)))[self.first_chunk]
        low = 0
        while low < len(self.num_chunks):
            high = max(low + 1, int(np.searchsorted(ends, ends[low] + _MESSAGES_AT_ONCE, side="right")) - 1)
            chunks = np.arange(self.first_chunk[low], self.first_chunk[high])
            yield self._expand(*self._cross(chunks, np.arange(self.first_hop[low], self.first_hop[high])))
            low = high

    def of_rank(self, rank: int) -> tuple[Columns, Columns]:
        """What one rank gives, and what it takes, by round."""
        sets = self._sets_of.get(rank)
        if sets is None:
            return Columns.joined(()), Columns.joined(())
        host = self.hosts.index(self.host_of[rank])
        mine = np.flatnonzero(np.isin(self.takers, sets) | np.isin(self.givers, sets))
        near = self._expand(*self._cross(mine, np.flatnonzero(self.hop_taker == host)))
        far = self._expand(*self._cross(mine, np.flatnonzero((self.hop_giver == host) & (self.hop_taker != host))))
        given = [each.take(np.flatnonzero(each.giver == rank)) for each in (near, far)]
        return Columns.joined(given).sorted(), near.take(np.flatnonzero(near.taker == rank)).sorted()

    @cached_property
    def num_rounds(self) -> int:
        """One more than the last round."""
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

    def _cross(self, chunks: IntArray, hops: IntArray) -> tuple[IntArray, IntArray]:
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
        place = chunk - self.first_chunk[flow]
        count = self.num_chunks[flow]
        period = place * self.num_periods // count
        turn = place - -(-period * count // self.num_periods)
        colour = self.hop_colour[hop]
        start = (((period + self.lag[hop]) * self.num_colours + colour) * self.num_turns + turn) * self.num_steps
        seats = self._seats
        first, count = seats.find(self.takers[chunk], self.hop_taker[hop])
        entry = (place + colour) % count
        before = self.before[hop]
        owned = before == OWNED
        from_set = np.where(owned, self.givers[chunk], self.takers[chunk])
        from_first, from_count = seats.find(from_set, self.hop_giver[hop])
        offset = place + np.where(owned, colour, self.hop_colour[before])
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
    """The ranks of every set, by host."""

    ranks: IntArray
    """By set, then host, then rank."""
    keys: IntArray
    """Set and host of every run of ranks, as one number, ascending."""
    firsts: IntArray
    """Where each run begins."""
    counts: IntArray
    """How long it is."""
    num_hosts: int

    @classmethod
    def of(cls, rank_sets: Sequence[tuple[int, ...]], host_of: Mapping[int, str], hosts: Sequence[str]) -> _Seats:
        number_of = {host: number for number, host in enumerate(hosts)}
        known = {rank: number_of[host] for rank, host in host_of.items()}
        ranks = np.array([rank for each in rank_sets for rank in each], dtype=np.int64)
        host = np.array([known[rank] for each in rank_sets for rank in each], dtype=np.int64)
        key = np.repeat(np.arange(len(rank_sets)), [len(each) for each in rank_sets]) * len(hosts) + host
        order = np.argsort(key, kind="stable")
        keys, firsts, counts = np.unique(key[order], return_index=True, return_counts=True)
        return cls(ranks[order], keys, firsts, counts, len(hosts))

    def find(self, sets: IntArray, hosts: IntArray) -> tuple[IntArray, IntArray]:
        """The start and the number of the ranks of each set on the host given with it."""
        at = np.searchsorted(self.keys, sets * self.num_hosts + hosts)
        return self.firsts[at], self.counts[at]


COLUMNS = ("givers", "takers", "first_chunk", "first_hop", "hop_giver", "hop_taker", "hop_colour")
"""Columns of flows, beside those of their chunks."""


def columns_of(flows: Flows) -> tuple[IntArray, ...]:
    """The columns of flows, in the order of COLUMNS."""
    return tuple(getattr(flows, name) for name in COLUMNS)
