"""Which rank sends each chunk to which? From hops between hosts to sendings between ranks.

Definitions. A *sending* carries one chunk from one rank to another. A rank is *informed* of a chunk when it gives it
from its own memory or has received it. A sending is *after* the one that informed its giver.

Algorithm, for each chunk with its route, givers and takers:

1. Givers are informed from the start.
2. For every hop of the route: one taker on the hop's host, the *entry*, gets the chunk from an informed rank of the
   hop's giver host. A chunk enters a host once, so nothing crosses a NIC twice.
3. Inside every host the remaining takers get it from informed ranks of the same host.

Every choice falls on the rank with the fewest bytes to send so far, lowest rank on ties. Chunk by chunk this spreads
entries over the devices of a host, and turns the inside of a host into chains or trees as its loads ask for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from remesh.resharding.schedule.senders import Route


@dataclass(frozen=True, slots=True)
class Sending:
    """One chunk from one rank to another."""

    giver: int
    taker: int
    chunk: int
    """Number of the chunk in the plan."""
    nbytes: int
    after: int
    """Number of the sending by which the giver got the chunk; -1 when it gives from its own memory."""


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
        self, chunk: int, nbytes: int, route: Route, givers: tuple[int, ...], takers: tuple[int, ...]
    ) -> None:
        """Sendings that bring one chunk from ``givers`` to all of ``takers`` (none of them a giver) by the route."""
        owners = self._by_host(givers)
        informed: dict[str, dict[int, int]] = {}
        waiting = {host: list(ranks) for host, ranks in self._by_host(takers).items()}
        for hop in route.hops:
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
