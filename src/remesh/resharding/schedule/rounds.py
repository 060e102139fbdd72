"""In which round? Rounds in which every rank sends at most one message and receives at most one.

Definitions. A host has a *lane* for each of its NICs. A message between hosts takes a lane on either side; one inside a
host none.

Two algorithms:

- `number_rounds` keeps to a sequence that was made with times in mind (`remesh.resharding.schedule.timeline`).
- `compute_rounds` is first fit, for what has no such sequence: sendings in the given order take the first round in
  which their two ranks and their two hosts are free, and which comes after the one that brings the giver its chunk.
  Busy rounds are bits of an integer, so a round is found in a few operations however full the schedule is.

No barrier separates rounds when a plan runs: the rounds fix the order in which each rank posts its messages, and keep
many givers from turning to one taker at the same time. First fit promises less than twice as many rounds as the
busiest line has messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from remesh.resharding.model.network import Network
from remesh.resharding.schedule.relay import Sending

_MAX_LANES = 8


@dataclass(frozen=True, slots=True)
class HostLanes:
    """How many messages pass through the NICs of each host at the same time."""

    host_of: Mapping[int, str]
    """Host of every rank."""
    num_lanes: Mapping[str, int] = field(default_factory=dict)
    """HostLanes of every host that has more than one. Invariant: >= 2."""


def lanes_of(host_of: Mapping[int, str], network: Network | None = None) -> HostLanes:
    """One lane for each NIC of a host."""
    if network is None:
        return HostLanes(host_of)
    nics = {host: network.hosts[host].num_nics for host in sorted(set(host_of.values()))}
    return HostLanes(host_of, {host: min(count, _MAX_LANES) for host, count in nics.items() if count > 1})


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
