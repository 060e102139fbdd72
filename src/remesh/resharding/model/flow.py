"""Even spreading of shared work: the smallest largest load, exactly, by maximum flows.

Definitions. A *work item* of ``weight`` bytes is to be sent ``copies`` times. Each of its bytes must be sent at least
once by an *owner*; the other ``copies - 1`` sendings may be done by owners or by *relays*. The *load* of a worker is
the bytes it sends for all items, divided by its *rate*. Wanted: shares with the smallest possible largest load.

Network: source -> item (``weight * copies``) -> owners; item -> its relay node (``weight * (copies - 1)``) -> relays;
every worker -> sink, with the bytes it can send in time ``load``, rounded up.

Algorithm (Newton's method on the cuts, as Dinkelbach does for ratios):

1. Start with a load that is surely not above the optimum.
2. Extend the flow to a maximum one (Dinic). If it carries everything, the load is the optimum.
3. Otherwise the minimum cut holds a set T of workers that has more work than ``load`` times the sum of its rates;
   raise the load to exactly what that set needs, and go on from 2. It never passes the optimum and rises every time.

Work is an integer number of bytes and loads are fractions, so the comparison in step 2 is exact.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from remesh.foundation.errors import PlanError

_UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Work:
    """One item of work that may be shared."""

    weight: int
    """Bytes of the item. Invariant: >= 0."""
    copies: int
    """How many times it is to be sent. Invariant: >= 1; 1 when there are no relays."""
    owners: tuple[str, ...]
    """Workers that can do the first sending. Invariant: distinct, at least one."""
    relays: tuple[str, ...] = ()
    """Workers that can do later sendings. Invariant: distinct, none is an owner."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Work spread over workers."""

    load: Fraction
    """The smallest possible largest load of a worker, in units of time; in bytes when all rates are 1."""
    busiest: tuple[str, ...]
    """Workers that force it: no other worker can take their work, and it fills ``load`` of each of them, up to
    rounding. Empty when ``at_least`` was enough."""
    by_worker: tuple[Mapping[str, int], ...]
    """For each item the bytes that each worker sends. Invariant: values > 0, adding up to ``weight * copies``."""

    @property
    def load_bytes(self) -> int:
        """The load rounded up, which is what whole bytes allow when all rates are 1."""
        return math.ceil(self.load)


def spread(items: Sequence[Work], at_least: int | Fraction = 0, rates: Mapping[str, Fraction] | None = None) -> Shares:
    """Shares with the smallest largest load; loads up to ``at_least`` count as free, so shares may be lumpy.

    ``rates`` are the workers' bytes per unit of time, 1 for all when they are not given.
    """
    workers = sorted({worker for item in items for worker in (*item.owners, *item.relays)})
    for item in items:
        if not item.owners:
            raise PlanError(
                f"spreading {len(items)} items of work: one of {item.weight} bytes has no owner, expected one or more; "
                "give each item at least one holder"
            )
    rate = [Fraction(1) if rates is None else rates[worker] for worker in workers]
    free = [item for item in items if len(item.owners) + len(item.relays) > 1]
    fixed: dict[str, int] = dict.fromkeys(workers, 0)
    for item in items:
        if len(item.owners) + len(item.relays) == 1:
            fixed[item.owners[0]] += item.weight * item.copies
    forced = [fixed[worker] / rate[at] for at, worker in enumerate(workers)]
    load = max([Fraction(at_least), *forced])
    busiest = tuple(worker for at, worker in enumerate(workers) if forced[at] == load > at_least)[:1]
    network = _FlowNetwork(len(workers) + 2)
    # What a worker can send in time ``load``, rounded up: the fractional optimum then fits in whole bytes.
    sink_edges = [
        network.join(2 + at, 1, math.ceil(load * rate[at]) - fixed[worker]) for at, worker in enumerate(workers)
    ]
    edges = _join_items(network, free, workers)
    total = sum(item.weight * item.copies for item in free)
    carried = network.extend(0, 1)
    while carried < total:
        inside = network.reachable(0)
        tight = [at for at in range(len(workers)) if inside[2 + at]]
        # Capacity of this cut = what does not depend on the load + what the tight workers can send.
        able = [math.ceil(load * rate[at]) for at in tight]
        load = (total - carried + sum(able)) / sum((rate[at] for at in tight), Fraction(0))
        busiest = tuple(workers[at] for at in tight)
        for edge, worker, per_time in zip(sink_edges, workers, rate, strict=True):
            network.room[edge] = math.ceil(load * per_time) - fixed[worker] - network.room[edge ^ 1]
        carried += network.extend(0, 1)
    shared = iter([{worker: n for worker, edge in item if (n := network.room[edge ^ 1]) > 0} for item in edges])
    by_worker = tuple(
        next(shared) if len(item.owners) + len(item.relays) > 1 else {item.owners[0]: item.weight * item.copies}
        for item in items
    )
    return Shares(load, busiest, by_worker)


def _join_items(network: _FlowNetwork, items: Sequence[Work], workers: Sequence[str]) -> list[list[tuple[str, int]]]:
    """Add the items to the network; for each the edges to its workers."""
    node_of = {worker: 2 + at for at, worker in enumerate(workers)}
    edges = []
    for item in items:
        node = network.add_node()
        network.join(0, node, item.weight * item.copies)
        # Relays come first: an owner that can hand over spares its NIC for items that no other host holds.
        to_workers = []
        if item.relays and item.copies > 1:
            relay_node = network.add_node()
            network.join(node, relay_node, item.weight * (item.copies - 1))
            to_workers += [(worker, network.join(relay_node, node_of[worker], _UNBOUNDED)) for worker in item.relays]
        to_workers += [(worker, network.join(node, node_of[worker], _UNBOUNDED)) for worker in item.owners]
        edges.append(to_workers)
    return edges


class _FlowNetwork:
    """A flow network; edge ``e`` and its reverse ``e ^ 1`` share their capacity."""

    def __init__(self, num_nodes: int) -> None:
        self.head: list[int] = []
        """Node that each edge enters."""
        self.room: list[int] = []
        """Capacity left on each edge; on a reverse edge this is the flow of the edge itself."""
        self.edges_of: list[list[int]] = [[] for _ in range(num_nodes)]

    def add_node(self) -> int:
        self.edges_of.append([])
        return len(self.edges_of) - 1

    def join(self, tail: int, head: int, capacity: int) -> int:
        edge = len(self.head)
        self.head += [head, tail]
        self.room += [capacity, 0]
        self.edges_of[tail].append(edge)
        self.edges_of[head].append(edge ^ 1)
        return edge

    def extend(self, source: int, sink: int) -> int:
        """Raise the flow to a maximum one (Dinic); returns by how much."""
        raised = 0
        while (level := self._levels(source))[sink] >= 0:
            next_edge = [0] * len(self.edges_of)
            while pushed := self._push_along_levels(source, sink, level, next_edge):
                raised += pushed
        return raised

    def reachable(self, source: int) -> list[bool]:
        """The nodes on the source's side of the minimum cut, once the flow is maximum."""
        return [level >= 0 for level in self._levels(source)]

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self.edges_of)
        level[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            for edge in self.edges_of[node]:
                if self.room[edge] > 0 and level[self.head[edge]] < 0:
                    level[self.head[edge]] = level[node] + 1
                    queue.append(self.head[edge])
        return level

    def _push_along_levels(self, source: int, sink: int, level: list[int], next_edge: list[int]) -> int:
        """Send as much as fits along one path of rising levels; 0 when there is none left."""
        path: list[int] = []
        node = source
        while node != sink:
            while next_edge[node] < len(self.edges_of[node]):
                edge = self.edges_of[node][next_edge[node]]
                if self.room[edge] > 0 and level[self.head[edge]] == level[node] + 1:
                    break
                next_edge[node] += 1
            else:
                if not path:
                    return 0
                node = self.head[path.pop() ^ 1]
                next_edge[node] += 1
                continue
            path.append(edge)
            node = self.head[edge]
        amount = min(self.room[edge] for edge in path)
        for edge in path:
            self.room[edge] -= amount
            self.room[edge ^ 1] += amount
        return amount
