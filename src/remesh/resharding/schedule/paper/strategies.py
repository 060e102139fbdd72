"""Strategies of the paper, and the baselines for senders and order, as routings.

A strategy turns host groups and their streams into chunks and sendings, as the planner's own split does, so that its
plan is checked, carried out and timed in the same way. Two kinds:

- *ways* to bring a stream from one sender host to all its takers. Each stream has one sender, chosen longest first
  among the hosts that own it, by what the way makes a sender send. Streams travel side by side, in the planner's order.

      send_recv          the whole stream to each device in turn
      local_allgather    one part for each device of a host, to each host in turn; a ring inside the host
      global_allgather   one part for each device of all hosts; then a ring of hosts, and rings inside them
      tree               binomial: every holder sends it on
      chain              in K chunks, each host passes on to the next
      two_trees          even chunks down one tree, odd ones down another; every host is inner node of at most one
      broadcast          chain or two trees, whichever costs less (`cost`)

- *orders*: `baselines` choose sender and order of slices, which travel as exclusive chains. A chain
  begins with the receiver that is free last, so that it occupies its NICs no earlier than in its order.

Inside a host chunks go from device to device, from the one by which they entered. Takers on a host that owns the
stream are served from there. A chunk enters a host once, except with `send_recv`.

Source: arXiv 2211.05322, section 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from remesh.resharding.model.network import Network
from remesh.resharding.schedule.chunks import Chunk, SliceStream, cut_streams
from remesh.resharding.schedule.order import Sending, compute_order, lanes_of, lines_of
from remesh.resharding.schedule.paper.baselines import ALGORITHMS, MulticastTask, Order
from remesh.resharding.schedule.paper.cost import SliceCast, best_num_chunks, cost_of, two_tree_delay
from remesh.resharding.schedule.senders import Route, assign_whole
from remesh.resharding.schedule.timeline import compute_starts, number_rounds
from remesh.resharding.schedule.trees import Hop, chain_hops, two_tree_hops


@dataclass(frozen=True, slots=True)
class Routed:
    """Chunks and how they travel."""

    chunks: list[Chunk]
    sendings: list[Sending]
    """Invariant: a chunk's sendings come after the one that informs their giver."""
    rounds: list[int]
    """Round of each sending."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The hosts and links that a strategy plans for, and the largest message."""

    host_of: Mapping[int, str]
    chunk_bytes: int
    """Largest message."""
    network: Network | None
    """The links, if they are known."""
    _known: dict[int, tuple[tuple[int, ...], dict[str, tuple[int, ...]]]] = field(default_factory=dict, repr=False)
    """By identity of a tuple of ranks: the tuple, which keeps the identity its own, and its ranks by host."""

    def by_host(self, ranks: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Ranks by host, hosts ascending; worked out once for a tuple, which many streams share."""
        if id(ranks) not in self._known:
            found: dict[str, list[int]] = {}
            for rank in ranks:
                found.setdefault(self.host_of[rank], []).append(rank)
            self._known[id(ranks)] = (ranks, {host: tuple(found[host]) for host in sorted(found)})
        return self._known[id(ranks)][1]


class _Board:
    """Collects the chunks and sendings of a strategy."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.chunks: list[Chunk] = []
        self.sendings: list[Sending] = []
        self.progress: list[float] = []
        """For each chunk how much of its stream goes before it: at least 0, below 1."""
        self.phases: list[int] = []
        """For each sending its phase; a phase begins when the one before has ended."""
        self._informed: dict[tuple[int, int], int] = {}
        """The sending by which (chunk, rank) was informed; absent for those who give from their own memory."""
        self._sent_bytes: dict[int, int] = {}

    def send(self, chunk: int, giver: int, taker: int, phase: int = 0) -> None:
        """One more sending; the giver owns the chunk or got it by an earlier one."""
        self.phases.append(phase)
        nbytes = self.chunks[chunk].nbytes
        self._informed[chunk, taker] = len(self.sendings)
        self._sent_bytes[giver] = self._sent_bytes.get(giver, 0) + nbytes
        self.sendings.append(Sending(giver, taker, chunk, nbytes, self._informed.get((chunk, giver), -1)))

    def pass_around(self, chunk: int, first: int, ranks: Sequence[int], phase: int = 0) -> None:
        """Pass a stream from one rank through all the others in turn, beginning behind it if it is among them."""
        start = ranks.index(first) + 1 if first in ranks else 0
        ring = [first, *(rank for rank in (*ranks[start:], *ranks[:start]) if rank != first)]
        for giver, taker in itertools.pairwise(ring):
            self.send(chunk, giver, taker, phase)

    def least_loaded(self, ranks: Iterable[int]) -> int:
        """The rank that has sent least so far, the lowest on ties."""
        return min(ranks, key=lambda rank: (self._sent_bytes.get(rank, 0), rank))


class _Delivery:
    """One stream on its way from one sender."""

    def __init__(self, board: _Board, stream: SliceStream, sender_host: str) -> None:
        self._board = board
        self._parts = stream.parts
        self.sender_host = sender_host
        self._givers_on = board.setting.by_host(stream.givers)
        takers_on = board.setting.by_host(stream.takers)
        self.nbytes = stream.nbytes
        self.sender = board.least_loaded(self._givers_on[sender_host])
        self.hosts = tuple(host for host in takers_on if host not in self._givers_on)
        """Hosts to be reached, ascending."""
        self.takers_on = takers_on
        self.problem = self._problem()
        self.num_steps = 1
        """Steps in which it is sent."""

    def cut(self, num_parts: Iterable[int] = (1,), largest: int | None = None) -> list[tuple[float, int]]:
        """Cut into chunks, and at least into each of these numbers of equal parts.

        What comes back are pairs of a chunk's middle, as a fraction of the stream, and its number.
        """
        board = self._board
        stops = sorted({self.nbytes * (n + 1) // num for num in num_parts for n in range(num)} - {0})
        routes = [Route(start, stop, ()) for start, stop in itertools.pairwise([0, *stops])]
        sizes = [min(largest or self.nbytes, board.setting.chunk_bytes)] * len(routes)
        found = []
        at = 0
        for cut in cut_streams([self._parts], routes, sizes):
            found.append(((at + cut.chunk.nbytes / 2) / self.nbytes, len(board.chunks)))
            at += cut.chunk.nbytes
            board.chunks.append(cut.chunk)
            board.progress.append(0.0)
            self._serve_own_hosts(found[-1][1])
        self.pace([[chunk] for _, chunk in found])
        return found

    def pace(self, steps: Sequence[Sequence[int]]) -> None:
        """Set which chunks travel in the same step; without a call each has its own, in the order of the cuts."""
        self.num_steps = len(steps)
        for number, chunks in enumerate(steps):
            for chunk in chunks:
                self._board.progress[chunk] = number / len(steps)

    def send(self, chunk: int, taker: int) -> None:
        """Bring a chunk from the sender to a rank."""
        self._board.send(chunk, self.sender, taker)

    def hop(self, chunk: int, hop: Hop, place: int = 0, phase: int = 0) -> None:
        """Bring a chunk into a host, from the sender or from a host that it entered at the same place."""
        giver = self.sender if hop.giver == self.sender_host else self.entry(hop.giver, place)
        self._board.send(chunk, giver, self.entry(hop.taker, place), phase)

    def fan_out(self, chunk: int, host: str, place: int = 0, phase: int = 0) -> None:
        """Pass a chunk that entered a host on to its other takers."""
        self._board.pass_around(chunk, self.entry(host, place), self.takers_on[host], phase)

    def entry(self, host: str, place: int) -> int:
        """The taker by which chunks of this place enter the host."""
        takers = self.takers_on[host]
        return takers[place % len(takers)]

    def _serve_own_hosts(self, chunk: int) -> None:
        for host, takers in self.takers_on.items():
            if host in self._givers_on:
                self._board.pass_around(chunk, self._board.least_loaded(self._givers_on[host]), takers)

    def _problem(self) -> SliceCast:
        setting = self._board.setting
        num_devices = max((len(self.takers_on[host]) for host in self.hosts), default=1)
        num_hosts = max(len(self.hosts), 1)
        if setting.network is None:
            return SliceCast(self.nbytes, num_hosts, num_devices, chunk_bytes=setting.chunk_bytes)
        links = [setting.network.hosts[host] for host in (self.sender_host, *self.hosts)]
        rate = min(link.rate_bytes_per_s for link in links)
        return SliceCast(self.nbytes, num_hosts, num_devices, rate, setting.network.latency_s, setting.chunk_bytes)


def _send_recv(delivery: _Delivery) -> None:
    chunks = delivery.cut()
    for host in delivery.hosts:
        for taker in delivery.takers_on[host]:
            for _, chunk in chunks:
                delivery.send(chunk, taker)


def _local_allgather(delivery: _Delivery) -> None:
    chunks = delivery.cut({len(delivery.takers_on[host]) for host in delivery.hosts} or (1,))
    for host in delivery.hosts:
        for middle, chunk in chunks:
            place = int(middle * len(delivery.takers_on[host]))
            delivery.hop(chunk, Hop(delivery.sender_host, host), place)
            delivery.fan_out(chunk, host, place)


def _global_allgather(delivery: _Delivery) -> None:
    # Parts are dealt to hosts in turn, so that all hosts have theirs at about the same time, when the ring begins.
    widest = max((len(delivery.takers_on[host]) for host in delivery.hosts), default=0)
    dealt = [(home, place) for place in range(widest) for home in range(len(delivery.hosts))]
    places = [(home, place) for home, place in dealt if place < len(delivery.takers_on[delivery.hosts[home]])]
    pieces: dict[tuple[int, int], list[int]] = {}
    for middle, chunk in delivery.cut((max(len(places), 1),)):
        if places:
            pieces.setdefault(places[int(middle * len(places))], []).append(chunk)
    turns = sorted(
        (place, turn, home, chunk) for (home, place), chunks in pieces.items() for turn, chunk in enumerate(chunks)
    )
    delivery.pace([[chunk] for *_, chunk in turns] or [[]])
    for step in range(len(delivery.hosts)):
        for place, _, home, chunk in turns:
            before, host = (delivery.hosts[(home + at) % len(delivery.hosts)] for at in (step - 1, step))
            delivery.hop(chunk, Hop(before if step else delivery.sender_host, host), place, step)
            delivery.fan_out(chunk, host, place, step)


def _tree(delivery: _Delivery) -> None:
    chunks = delivery.cut()
    informed = [delivery.sender_host]
    waiting = list(delivery.hosts)
    while waiting:
        for hop in map(Hop, tuple(informed), tuple(waiting)):
            waiting.remove(hop.taker)
            informed.append(hop.taker)
            for _, chunk in chunks:
                delivery.hop(chunk, hop)
                delivery.fan_out(chunk, hop.taker)


def _chain(delivery: _Delivery, hosts: Sequence[str] | None = None) -> None:
    order = delivery.hosts if hosts is None else hosts
    hops = chain_hops(delivery.sender_host, order) if order else ()
    for place, chunk in enumerate(_cut_fine(delivery, max(len(hops) - 1, 0))):
        _along(delivery, chunk, place, hops)


def _two_trees(delivery: _Delivery) -> None:
    trees = two_tree_hops(delivery.sender_host, delivery.hosts)
    chunks = _cut_fine(delivery, two_tree_delay(len(delivery.hosts)))
    delivery.pace([chunks[start : start + 2] for start in range(0, len(chunks), 2)])
    for place, chunk in enumerate(chunks):
        # A place for each pair of chunks: with two devices, both trees use both.
        _along(delivery, chunk, place // 2, trees[place % 2])


def _broadcast(delivery: _Delivery) -> None:
    chain, trees = (cost_of(name, delivery.problem).seconds for name in ("chain", "two_trees"))
    (_chain if chain <= trees else _two_trees)(delivery)


def _cut_fine(delivery: _Delivery, delay: int) -> list[int]:
    """Chunks small enough for a pipeline that takes so many chunk times to fill."""
    num_chunks = best_num_chunks(delivery.problem, delay)
    return [chunk for _, chunk in delivery.cut(largest=-(-delivery.nbytes // num_chunks))]


def _along(delivery: _Delivery, chunk: int, place: int, hops: Sequence[Hop]) -> None:
    for hop in hops:
        delivery.hop(chunk, hop, place)
    for hop in hops:
        delivery.fan_out(chunk, hop.taker, place)


def _route_streams(
    way: Callable[[_Delivery], None],
    num_sent: Callable[[Sequence[int], int], int],
    streams: Sequence[SliceStream],
    setting: Setting,
) -> Routed:
    board = _Board(setting)
    num_periods = 1
    for stream, host in zip(streams, _balanced_senders(streams, num_sent, setting), strict=True):
        delivery = _Delivery(board, stream, host)
        way(delivery)
        num_periods = max(num_periods, delivery.num_steps)
    return Routed(board.chunks, board.sendings, _rounds_by_phase(board, num_periods))


def _rounds_by_phase(board: _Board, num_periods: int) -> list[int]:
    """Streams side by side, one phase after the other."""
    host_of, network = board.setting.host_of, board.setting.network
    lines = lines_of(host_of, network)
    is_local = [host_of[sending.giver] == host_of[sending.taker] for sending in board.sendings]
    sequence: list[int] = []
    for phase in range(max(board.phases, default=-1) + 1):
        members = [number for number, each in enumerate(board.phases) if each == phase]
        place = {number: at for at, number in enumerate(members)}
        sendings = [replace(each, after=place.get(each.after, -1)) for each in map(board.sendings.__getitem__, members)]
        order = compute_order(sendings, board.progress, num_periods, lines)
        # What crosses goes first, whatever stays inside hosts fills the gaps: nothing that crosses waits for it.
        order.sort(key=lambda at: is_local[members[at]])
        sequence += [members[at] for at in compute_starts(sendings, order, host_of, network)]
    return number_rounds(board.sendings, sequence, lanes_of(host_of, network))


def _balanced_senders(
    streams: Sequence[SliceStream], num_sent: Callable[[Sequence[int], int], int], setting: Setting
) -> list[str]:
    """Choose the host that sends each stream: the longest stream first, the least loaded host."""
    host_of = setting.host_of
    owners = [setting.by_host(stream.givers) for stream in streams]
    hosts = sorted({host for each in owners for host in each})
    number_of = {host: number for number, host in enumerate(hosts)}
    weights = []
    for stream, own in zip(streams, owners, strict=True):
        far = [rank for rank in stream.takers if host_of[rank] not in own]
        times = num_sent(far, len({host_of[rank] for rank in far})) if far else 0
        weights.append(times * stream.nbytes)
    chosen = assign_whole(weights, [[number_of[host] for host in own] for own in owners])
    return [hosts[number] for number in chosen]


def _route_ordered(
    algorithm: Callable[[Sequence[MulticastTask]], Order], streams: Sequence[SliceStream], setting: Setting
) -> Routed:
    slices = sorted(
        (SliceStream(stream.givers, stream.takers, [part], part.nbytes) for stream in streams for part in stream.parts),
        key=lambda each: (each.parts[0].tensor, each.parts[0].box),
    )
    tasks = [multicast_task(each, setting.host_of) for each in slices]
    crossing = [number for number, task in enumerate(tasks) if task.receivers]
    order = algorithm([tasks[number] for number in crossing])
    board = _Board(setting)
    free_at: dict[str, int] = {}
    for multicast in order.multicasts:
        number = crossing[multicast.task]
        latest_first = sorted(tasks[number].receivers, key=lambda host: (-free_at.get(host, 0), host))
        _chain(_Delivery(board, slices[number], multicast.sender), latest_first)
        free_at.update(dict.fromkeys(latest_first, multicast.finish))
    for number, task in enumerate(tasks):
        if not task.receivers:
            _Delivery(board, slices[number], task.owners[0]).cut()
    lanes = lanes_of(setting.host_of, setting.network)
    return Routed(board.chunks, board.sendings, number_rounds(board.sendings, range(len(board.sendings)), lanes))


def multicast_task(stream: SliceStream, host_of: Mapping[int, str]) -> MulticastTask:
    """What the published algorithms see of a slice."""
    owners = tuple(dict.fromkeys(host_of[rank] for rank in stream.givers))
    far = [rank for rank in stream.takers if host_of[rank] not in owners]
    receivers = tuple(sorted({host_of[rank] for rank in far}))
    return MulticastTask(owners, receivers, stream.nbytes, len(far))


def _each_device(far: Sequence[int], num_hosts: int) -> int:
    return len(far)


def _each_host(far: Sequence[int], num_hosts: int) -> int:
    return num_hosts


def _once(far: Sequence[int], num_hosts: int) -> int:
    return 1


STRATEGIES: Mapping[str, Callable[[Sequence[SliceStream], Setting], Routed]] = {
    "send_recv": partial(_route_streams, _send_recv, _each_device),
    "local_allgather": partial(_route_streams, _local_allgather, _each_host),
    "global_allgather": partial(_route_streams, _global_allgather, _once),
    "tree": partial(_route_streams, _tree, _once),
    "chain": partial(_route_streams, _chain, _once),
    "two_trees": partial(_route_streams, _two_trees, _once),
    "broadcast": partial(_route_streams, _broadcast, _once),
    **{name: partial(_route_ordered, algorithm) for name, algorithm in ALGORITHMS.items()},
}
"""Every strategy by its name, besides the planner's own."""
