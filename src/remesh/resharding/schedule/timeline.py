"""Timing pass over rows: a schedule in time, event by event, and the rounds that keep to it.

It looks at each message, so it is for plans of not too many. Rows between hosts become rows between ranks:

1. For each chunk, hops between hosts become *sendings* between ranks (`Relay`). A rank is *informed* of a chunk when it
   gives it from its own memory or has received it. For every hop one taker on the hop's host, the *entry*, gets the
   chunk from an informed rank of the hop's giver host. A chunk enters a host once, so nothing crosses a NIC twice.
   Inside every host the remaining takers get it from informed ranks of the same host. Every choice falls on the rank
   with the fewest bytes to send so far, lowest rank on ties: chunk by chunk this spreads entries over the devices of a
   host, and turns the inside of a host into chains or trees as its loads ask for.
2. Sendings get priorities (`remesh.resharding.schedule.order`), from these times, and rounds that keep to them.

*Times.* A message between hosts *occupies* the sending side of its giver, the taking side of its taker, a NIC out
of one host and a NIC into the other, and the uplinks between two racks: each of them for the time that its bytes take
there. It is there when the slowest has it. A message inside a host occupies two sides of their own: a rank passes on to
its neighbours while its NIC takes the next chunk, so that a moment's copy never makes another chunk overtake. A message
is *ready* when its giver has the chunk.

Algorithm (list scheduling): whenever something becomes free, the ready message of highest priority that finds all it
needs free starts. A message that does not waits at one of the things that are occupied, so an event costs no more than
the messages that wait there.

Priorities come from `order`. Chunks of unequal size drift away from the stages that these are made of;
working in time rather than in rounds keeps hosts busy all the same.

*Rounds.* In a round every rank sends at most one message and takes at most one. A host has a *lane* for each of its
NICs. A message between hosts takes a lane on either side; one inside a host none. `number_rounds` keeps to a sequence
that was made with times in mind. `compute_rounds` is first fit, for what has no such sequence: sendings in the given
order take the first round in which their two ranks and their two hosts are free, and which comes after the one that
brings the giver its chunk. Busy rounds are bits of an integer, so a round is found in a few operations however full the
schedule is. First fit promises less than twice as many rounds as the busiest line has messages.

No barrier separates rounds when a plan runs: the rounds fix the order in which each rank posts its messages, and keep
many givers from turning to one taker at the same time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from remesh.resharding.model.network import HostLink, Network
from remesh.resharding.schedule.host_rows import HostRows
from remesh.resharding.schedule.message_rows import Columns
from remesh.resharding.schedule.order import HostLanes, Sending, compute_order, lanes_of, lines_of
from remesh.resharding.schedule.rows import Rows
from remesh.resharding.schedule.trees import Hop

_LOCAL_SPEED = 16.0
"""How much faster ranks of a host reach each other than other hosts, where the caller sets none."""
_PLAIN = HostLink(1.0)


def schedule_in_time(made: HostRows, network: Network | None = None) -> Rows:
    """Rows between ranks, with a hop for every message, by the times at which messages start on these links."""
    sendings, host_of = _relay(made.untimed, made.sequence), made.untimed.host_of
    order = compute_order(sendings, made.progress, made.num_periods, lines_of(host_of, network))
    starts = compute_starts(sendings, order, host_of, network)
    rounds = number_rounds(sendings, starts, lanes_of(host_of, network))
    return Rows.of_messages(host_of, made.untimed.chunks, columns_of_sendings(sendings, rounds))


def columns_of_sendings(sendings: Sequence[Sending], rounds: Sequence[int]) -> Columns:
    """The messages that sendings are in their rounds."""
    ends = np.array([(each.giver, each.taker, each.chunk) for each in sendings], dtype=np.int64).reshape(-1, 3)
    return Columns(np.array(rounds, dtype=np.int64), *ends.T)


def _relay(rows: Rows, sequence: Sequence[int]) -> list[Sending]:
    """The sendings of all chunks, each after the one that informs its giver."""
    relay, hosts, sets = Relay(rows.host_of), rows.hosts, rows.rank_sets
    ends = zip(rows.hop_giver.tolist(), rows.hop_taker.tolist(), strict=True)
    hops = [Hop(hosts[giver], hosts[taker]) for giver, taker in ends]
    hops_of = [
        [hop for hop in hops[low:high] if hop.giver != hop.taker]
        for low, high in itertools.pairwise(rows.first_hop.tolist())
    ]
    columns = (rows.flow_of_chunk, rows.chunks.nbytes, rows.givers, rows.takers)
    flow, nbytes, givers, takers = (column.tolist() for column in columns)
    for chunk in sequence:
        relay.add_chunk(chunk, nbytes[chunk], hops_of[flow[chunk]], sets[givers[chunk]], sets[takers[chunk]])
    return relay.sendings


class Relay:
    """Collects the sendings of a plan, chunk after chunk."""

    def __init__(self, host_of: Mapping[int, str]) -> None:
        self._host_of = host_of
        self._sent_bytes = dict.fromkeys(host_of, 0)
        self._known: dict[int, tuple[tuple[int, ...], dict[str, tuple[int, ...]]]] = {}
        """By identity of a tuple of ranks: the tuple, which keeps the identity its own, and its ranks by host."""
        self.sendings: list[Sending] = []
        """All sendings so far. Invariant: ``sendings[i].after < i``."""

    def add_chunk(
        self, chunk: int, nbytes: int, hops: Sequence[Hop], givers: tuple[int, ...], takers: tuple[int, ...]
    ) -> None:
        """Sendings that bring one chunk from ``givers`` to all of ``takers``, none of them a giver, by these hops."""
        owners = self._by_host(givers)
        informed: dict[str, dict[int, int]] = {}
        waiting = {host: list(ranks) for host, ranks in self._by_host(takers).items()}
        for hop in hops:
            if hop.giver not in informed:
                informed[hop.giver] = dict.fromkeys(owners[hop.giver], -1)
            there = waiting[hop.taker]
            entry = there[0] if len(there) == 1 else self._least_loaded(there)
            there.remove(entry)
            informed[hop.taker] = {entry: self._send(chunk, nbytes, informed[hop.giver], entry)}
        for host, ranks in waiting.items():
            if ranks and host not in informed:
                informed[host] = dict.fromkeys(owners[host], -1)
            while ranks:
                taker = self._least_loaded(ranks)
                ranks.remove(taker)
                informed[host][taker] = self._send(chunk, nbytes, informed[host], taker)

    def _by_host(self, ranks: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Ranks by host; worked out once for a tuple, which many chunks share."""
        if id(ranks) not in self._known:
            found: dict[str, list[int]] = {}
            for rank in ranks:
                found.setdefault(self._host_of[rank], []).append(rank)
            self._known[id(ranks)] = (ranks, {host: tuple(there) for host, there in found.items()})
        return self._known[id(ranks)][1]

    def _send(self, chunk: int, nbytes: int, informed: Mapping[int, int], taker: int) -> int:
        giver = self._least_loaded(informed)
        self._sent_bytes[giver] += nbytes
        self.sendings.append(Sending(giver, taker, chunk, nbytes, informed[giver]))
        return len(self.sendings) - 1

    def _least_loaded(self, ranks: Collection[int]) -> int:
        if len(ranks) == 1:
            return next(iter(ranks))
        sent = self._sent_bytes
        return min([(sent[rank], rank) for rank in ranks])[1]


def compute_starts(
    sendings: Sequence[Sending], order: Sequence[int], host_of: Mapping[int, str], network: Network | None = None
) -> list[int]:
    """Numbers of the sendings by the time they start; ``order`` lists them by priority."""
    return _Timeline(sendings, order, host_of, network).run()


@dataclass(slots=True)
class _Bottleneck:
    """A side of a rank, the NICs of a host in one direction, or an uplink in one direction."""

    free: int
    """How many messages more it has room for."""
    waiting: list[tuple[int, int]]
    """(priority, number) of ready messages that found it occupied; a heap."""


@dataclass(frozen=True, slots=True)
class _Use:
    """What a message between two ranks occupies."""

    places: tuple[_Bottleneck, ...]
    """All of it."""
    by_rate: tuple[tuple[float, tuple[_Bottleneck, ...]], ...]
    """The same by bytes per unit of time, the slowest last."""


class _Timeline:
    def __init__(
        self, sendings: Sequence[Sending], order: Sequence[int], host_of: Mapping[int, str], network: Network | None
    ) -> None:
        self._sendings = sendings
        self._host_of = host_of
        self._network = network
        self._priority = [0] * len(sendings)
        for priority, number in enumerate(order):
            self._priority[number] = priority
        self._next_of: list[list[int]] = [[] for _ in sendings]
        self._known: dict[tuple[str, int | str], _Bottleneck] = {}
        self._uses: list[_Use] = []
        by_ranks: dict[tuple[int, int], _Use] = {}
        for number, sending in enumerate(sendings):
            if sending.after >= 0:
                self._next_of[sending.after].append(number)
            ranks = (sending.giver, sending.taker)
            if ranks not in by_ranks:
                by_ranks[ranks] = self._use_of(*ranks)
            self._uses.append(by_ranks[ranks])

    def _use_of(self, giver: int, taker: int) -> _Use:
        """NICs and uplinks at their rates; a rank is busy as long as its NIC is."""
        a, b = self._host_of[giver], self._host_of[taker]
        one, other = (_PLAIN if self._network is None else self._network.hosts[host] for host in (a, b))
        if a == b:
            rate = min(one.local_rate_bytes_per_s, _LOCAL_SPEED * one.rate_bytes_per_s * one.num_nics)
            found = [(rate, self._place("gives inside", giver)), (rate, self._place("takes inside", taker))]
        else:
            found = [
                (one.rate_bytes_per_s, self._place("gives", giver)),
                (other.rate_bytes_per_s, self._place("takes", taker)),
                (one.rate_bytes_per_s, self._place("out", a, one.num_nics)),
                (other.rate_bytes_per_s, self._place("in", b, other.num_nics)),
            ]
        if self._network is not None and self._network.rack_of(a) != self._network.rack_of(b):
            for way, host in (("up", a), ("down", b)):
                rack = self._network.rack_of(host)
                if rack is not None:
                    found.append((self._network.racks[rack], self._place(way, rack)))
        by_rate: dict[float, list[_Bottleneck]] = {}
        for rate, place in found:
            by_rate.setdefault(rate, []).append(place)
        return _Use(
            tuple(place for _, place in found),
            tuple((rate, tuple(places)) for rate, places in sorted(by_rate.items(), reverse=True)),
        )

    def _place(self, way: str, where: int | str, room: int = 1) -> _Bottleneck:
        return self._known.setdefault((way, where), _Bottleneck(room, []))

    def run(self) -> list[int]:
        """Numbers of the messages in the order of their starts."""
        started: list[int] = []
        # (time, number, which): the places of the message with this rate become free.
        events: list[tuple[float, int, int]] = []
        ready = [number for number, sending in enumerate(self._sendings) if sending.after < 0]
        freed: list[_Bottleneck] = []
        now = 0.0
        latency = 0.0 if self._network is None else self._network.latency_s
        while True:
            for number in self._start(ready, freed):
                started.append(number)
                nbytes = self._sendings[number].nbytes
                for which, (rate, _) in enumerate(self._uses[number].by_rate):
                    heapq.heappush(events, (now + latency + nbytes / rate, number, which))
            if not events:
                return started
            now = events[0][0]
            ready, freed = [], []
            while events and events[0][0] == now:
                _, number, which = heapq.heappop(events)
                use = self._uses[number]
                for place in use.by_rate[which][1]:
                    place.free += 1
                    freed.append(place)
                if which == len(use.by_rate) - 1:
                    ready += self._next_of[number]

    def _start(self, ready: Sequence[int], freed: Sequence[_Bottleneck]) -> list[int]:
        """Choose the messages that start now, given the messages that became ready and the places that became free."""
        found: list[int] = []
        # (priority, number, which of ``freed`` it waited at); -1 for those that waited nowhere.
        candidates = [(self._priority[number], number, -1) for number in ready]
        for at, place in enumerate(freed):
            if place.waiting:
                candidates.append((*heapq.heappop(place.waiting), at))
        heapq.heapify(candidates)
        while candidates:
            priority, number, at = heapq.heappop(candidates)
            occupied = next((place for place in self._uses[number].places if not place.free), None)
            if occupied is None:
                found.append(number)
                for place in self._uses[number].places:
                    place.free -= 1
            else:
                heapq.heappush(occupied.waiting, (priority, number))
            # The place may have room for the next one that waits there.
            if at >= 0 and freed[at].free and freed[at].waiting:
                heapq.heappush(candidates, (*heapq.heappop(freed[at].waiting), at))
        return found


def compute_rounds(sendings: Sequence[Sending], host_of: Mapping[int, str]) -> list[int]:
    """The round of each sending by first fit, counted from 0, for hosts with one NIC each; the same on every rank.

    Each sending comes after the one that informs its giver.
    """
    giving: dict[int, int] = {}
    taking: dict[int, int] = {}
    out: dict[str, int] = {}
    into: dict[str, int] = {}
    rounds: list[int] = []
    for sending in sendings:
        giver, taker = sending.giver, sending.taker
        a, b = host_of[giver], host_of[taker]
        first = rounds[sending.after] + 1 if sending.after >= 0 else 0
        busy = giving.get(giver, 0) | taking.get(taker, 0)
        if a != b:
            busy |= out.get(a, 0) | into.get(b, 0)
        busy >>= first
        # The lowest bit that is not set.
        at = first + (~busy & (busy + 1)).bit_length() - 1
        rounds.append(at)
        bit = 1 << at
        giving[giver] = giving.get(giver, 0) | bit
        taking[taker] = taking.get(taker, 0) | bit
        if a != b:
            out[a] = out.get(a, 0) | bit
            into[b] = into.get(b, 0) | bit
    return rounds


def number_rounds(sendings: Sequence[Sending], sequence: Iterable[int], lanes: HostLanes) -> list[int]:
    """The round of each sending when every rank and every lane keeps to the given sequence.

    ``sequence`` lists the numbers of the sendings, each after the one that informs its giver.
    """
    giving: dict[int, int] = {}
    taking: dict[int, int] = {}
    out = {host: [0] * lanes.num_lanes.get(host, 1) for host in set(lanes.host_of.values())}
    into = {host: list(free) for host, free in out.items()}
    rounds = [-1] * len(sendings)
    for number in sequence:
        sending = sendings[number]
        giver, taker = sending.giver, sending.taker
        at = max(giving.get(giver, 0), taking.get(taker, 0))
        if sending.after >= 0:
            at = max(at, rounds[sending.after] + 1)
        a, b = lanes.host_of[giver], lanes.host_of[taker]
        if a != b:
            at = max(at, min(out[a]), min(into[b]))
            for free in (out[a], into[b]):
                free[free.index(min(free))] = at + 1
        rounds[number] = at
        giving[giver] = taking[taker] = at + 1
    return rounds
