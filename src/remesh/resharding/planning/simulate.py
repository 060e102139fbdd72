"""Simulator: when every message of a plan starts and finishes by the host-level model.

Model, as for the lower bound (`model.bound`): a message between hosts occupies a NIC of its giver outwards
and a NIC of its taker inwards, each for the latency and its bytes at that NIC's rate; between racks it occupies both
uplinks too, for its bytes. It takes as long as the slowest of them. Inside a host a message occupies the two ranks at
the host's local rate, or takes no time if that is infinite.

Algorithm. Messages are taken in the plan's order. Each starts when its giver has the chunk and when everything that it
occupies is free; nothing overtakes. That is how a run behaves: ranks post their messages in the order of rounds, and
each connection keeps it. It is also exclusive use of NICs, so the closed forms of `schedule.paper.cost` come out
exactly.

Without any network all NICs carry one byte per unit of time, and times are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from remesh.foundation.errors import PlanError
from remesh.resharding.model.network import Network
from remesh.resharding.model.program import Message, Timing
from remesh.resharding.planning.plan import Plan

_MAX_MESSAGES = 2_000_000
"""More of them would take minutes and gigabytes."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The result of simulating a plan."""

    messages: tuple[Timing, ...]
    """One for each message of the plan, in its order."""
    busy_s: Mapping[tuple[str, str], float]
    """Time that the NICs of each host are in use, summed over them, by (host, ``"out"`` or ``"in"``)."""
    peak_staging_bytes: Mapping[int, int]
    """Most bytes that a rank has under way at once: being sent, being received, or kept to be passed on."""

    @property
    def total_s(self) -> float:
        """The time at which the last message ends."""
        return max((message.finish_s for message in self.messages), default=0.0)


def simulate_plan(plan: Plan, network: Network | None = None) -> SimulatedRun:
    """Play a plan through on a network, by default its own.

    Raises `PlanError` when one of its hosts is not there, or when it has too many messages to play each.

    >>> from remesh.layout import Box, Layout, Shard
    >>> from remesh.resharding import TensorMove, plan_reshard
    >>> src, dst = (Layout((8,), (Shard(rank, Box((0,), (8,))),), "float32") for rank in (0, 1))
    >>> plan = plan_reshard([TensorMove("w", src, dst)], {0: "a", 1: "b"})
    >>> simulate_plan(plan).total_s
    32.0
    """
    if network is None:
        network = plan.network or Network.uniform(plan.host_of.values())
    network.check_hosts(plan.host_of.values(), "simulating a plan")
    if len(plan.messages) > _MAX_MESSAGES:
        raise PlanError(
            f"simulating a plan: it has {len(plan.messages)} messages, expected at most {_MAX_MESSAGES}; simulate the "
            "same layouts on fewer hosts, or ask the plan itself for its bound and its bytes"
        )
    ports = _Ports(plan, network)
    messages = tuple(plan.messages)
    sizes = {number: chunk.nbytes for number, chunk in enumerate(plan.chunks)}
    arrived: dict[tuple[int, int], float] = {}
    timed = []
    for message in messages:
        nbytes = sizes[message.chunk]
        ready_s = arrived.get((message.giver, message.chunk), 0.0)
        start_s, finish_s = ports.serve(message, nbytes, ready_s)
        arrived[message.taker, message.chunk] = finish_s
        timed.append(Timing(1, message.round, message.giver, message.taker, nbytes, start_s, finish_s))
    return SimulatedRun(tuple(timed), ports.busy_s, _peak_staging(messages, timed))


class _Ports:
    """Everything that messages occupy, and when it is free."""

    def __init__(self, plan: Plan, network: Network) -> None:
        self._host_of = plan.host_of
        self._network = network
        self._free_s: dict[tuple[str, object, str], list[float]] = {}
        """By (kind, which one, direction): when each of its lines is free."""
        self.busy_s: dict[tuple[str, str], float] = {
            (host, way): 0.0 for host in sorted(set(plan.host_of.values())) for way in ("out", "in")
        }

    def serve(self, message: Message, nbytes: int, ready_s: float) -> tuple[float, float]:
        """Start and finish of the next message."""
        needed = list(self._needed(message, nbytes))
        start_s = max((min(lines) for lines, _ in needed), default=0.0)
        start_s = max(start_s, ready_s)
        for lines, seconds in needed:
            lines[lines.index(min(lines))] = start_s + seconds
        return start_s, start_s + max((seconds for _, seconds in needed), default=0.0)

    def _needed(self, message: Message, nbytes: int) -> Iterator[tuple[list[float], float]]:
        """The links that the message occupies, and for how long."""
        giver, taker = self._host_of[message.giver], self._host_of[message.taker]
        if giver == taker:
            rate = self._network.hosts[giver].local_rate_bytes_per_s
            if rate < math.inf:
                yield self._lines("rank", message.giver, "out", 1), nbytes / rate
                yield self._lines("rank", message.taker, "in", 1), nbytes / rate
            return
        for host, way in ((giver, "out"), (taker, "in")):
            link = self._network.hosts[host]
            seconds = self._network.latency_s + nbytes / link.rate_bytes_per_s
            self.busy_s[host, way] += seconds
            yield self._lines("nic", host, way, link.num_nics), seconds
        racks = self._network.hosts[giver].rack, self._network.hosts[taker].rack
        if racks[0] != racks[1]:
            for rack, way in zip(racks, ("out", "in"), strict=True):
                if rack is not None and rack in self._network.racks:
                    yield self._lines("rack", rack, way, 1), nbytes / self._network.racks[rack]

    def _lines(self, kind: str, which: object, way: str, num: int) -> list[float]:
        return self._free_s.setdefault((kind, which, way), [0.0] * num)


def _peak_staging(messages: Sequence[Message], timed: list[Timing]) -> dict[int, int]:
    """Bytes count on the giver while it sends from its own memory, on a taker until it has passed them on."""
    kept_until: dict[tuple[int, int], float] = {}
    for message, time in zip(messages, timed, strict=True):
        for rank in (message.giver, message.taker):
            key = (rank, message.chunk)
            kept_until[key] = max(kept_until.get(key, 0.0), time.finish_s)
    changes: dict[int, list[tuple[float, int, int]]] = {}
    took: set[tuple[int, int]] = set()
    for message, time in zip(messages, timed, strict=True):
        took.add((message.taker, message.chunk))
        taker = changes.setdefault(message.taker, [])
        taker += _stay(time.start_s, kept_until[message.taker, message.chunk], time.nbytes)
        if (message.giver, message.chunk) not in took:
            changes.setdefault(message.giver, []).extend(_stay(time.start_s, time.finish_s, time.nbytes))
    return {rank: _peak(of_rank) for rank, of_rank in sorted(changes.items())}


def _stay(start_s: float, finish_s: float, nbytes: int) -> tuple[tuple[float, int, int], tuple[float, int, int]]:
    """Changes of the bytes on a rank, to be sorted: at one moment what ends goes before what begins."""
    return (start_s, 1, nbytes), (finish_s, 0 if finish_s > start_s else 2, -nbytes)


def _peak(changes: list[tuple[float, int, int]]) -> int:
    now = peak = 0
    for _, _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak
