"""When does each message start, if nothing goes wrong? A schedule in time, event by event.

Definitions. A message between hosts *occupies* the sending side of its giver, the taking side of its taker, a NIC out
of one host and a NIC into the other, and the uplinks between two racks: each of them for the time that its bytes take
there. It is there when the slowest has it. A message inside a host occupies two sides of their own: a rank passes on to
its neighbours while its NIC takes the next chunk, so that a moment's copy never makes another chunk overtake. A message
is *ready* when its giver has the chunk.

Algorithm (list scheduling): whenever something becomes free, the ready message of highest priority that finds all it
needs free starts. A message that does not waits at one of the things that are occupied, so an event costs no more than
the messages that wait there.

Priorities come from `order`. Chunks of unequal size drift away from the stages that these are made of;
working in time rather than in rounds keeps hosts busy all the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remesh.resharding.model.network import HostLink, Network
from remesh.resharding.schedule.relay import Sending

_LOCAL_SPEED = 16.0
"""How much faster ranks of a host reach each other than other hosts, when nobody says."""


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
        one, other = (HostLink(1.0) if self._network is None else self._network.hosts[host] for host in (a, b))
        if a == b:
            rate = min(one.local_rate_bytes_per_s, _LOCAL_SPEED * one.total_rate_bytes_per_s)
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
