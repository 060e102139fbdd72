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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remesh.reshard.senders import Route


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
        self._sent_bytes: dict[int, int] = {}
        self.sendings: list[Sending] = []
        """All sendings so far. Invariant: ``sendings[i].after < i``."""

    def add_chunk(self, chunk: int, nbytes: int, route: Route, givers: Sequence[int], takers: Sequence[int]) -> None:
        """Sendings that bring one chunk from ``givers`` to all of ``takers`` (none of them a giver) by the route."""
        informed: dict[str, dict[int, int]] = {}
        for rank in givers:
            informed.setdefault(self._host_of[rank], {})[rank] = -1
        waiting: dict[str, list[int]] = {}
        for rank in takers:
            waiting.setdefault(self._host_of[rank], []).append(rank)
        for hop in route.hops:
            entry = self._least_loaded(waiting[hop.taker])
            waiting[hop.taker].remove(entry)
            informed[hop.taker] = {entry: self._send(chunk, nbytes, informed[hop.giver], entry)}
        for host, ranks in waiting.items():
            while ranks:
                taker = self._least_loaded(ranks)
                ranks.remove(taker)
                informed[host][taker] = self._send(chunk, nbytes, informed[host], taker)

    def _send(self, chunk: int, nbytes: int, informed: Mapping[int, int], taker: int) -> int:
        giver = self._least_loaded(informed)
        self._sent_bytes[giver] = self._sent_bytes.get(giver, 0) + nbytes
        self.sendings.append(Sending(giver, taker, chunk, nbytes, informed[giver]))
        return len(self.sendings) - 1

    def _least_loaded(self, ranks: Sequence[int] | Mapping[int, int]) -> int:
        return min(ranks, key=lambda rank: (self._sent_bytes.get(rank, 0), rank))
