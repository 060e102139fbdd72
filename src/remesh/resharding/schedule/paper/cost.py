"""Costs of bringing one slice to many devices, in closed form for every way.

Definitions. One sender host has a slice; ``A`` receiver hosts with ``B`` devices each want all of it. ``w`` is the time
of its bytes through one NIC, ``a`` the time that each message needs besides (*latency*): both occupy the NIC. Copies
inside a host are free. ``m`` is the number of messages that a slice is cut into because messages have a
largest size; with it unlimited, ``m = 1``.

    way                time
    send_recv          A * B * (m * a + w)
    local_allgather    A * (m' * a + w)               in m' >= B messages, one or more for each device of a host
    global_allgather   A * m'' * a + w + (A - 1) * (m'' * a + w / A)     scatter, then a ring of hosts
    tree               ceil(log2(A + 1)) * (m * a + w)     every host that has it sends it on
    chain              (K + A - 1) * (w / K + a)           in K chunks, each host passes on to the next
    two_trees          (K + 2 * ceil(log2(A + 1)) - 2) * (w / K + a)   in K chunks, half of them down each of two trees

The best number of chunks is ``K = sqrt((depth - 1) * w / a)``, and at most what the smallest sensible chunk allows.
With small slices the latency decides and trees or direct sends win; with large ones the chain or, to many hosts,
two trees, and then the time is that of one copy through one NIC: the floor.

Source: arXiv 2211.05322, section 3, with latency added; Sanders, Speck, Traeff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan" (2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from remesh.foundation.errors import PlanError

MIN_CHUNK_BYTES = 128 << 10
"""Chunks are not cut finer for the sake of a pipeline."""

CHUNKS_PER_DELAY = 64
"""Where latency is not known, a pipeline is cut into so many chunks for each chunk time that it takes to fill."""


@dataclass(frozen=True, slots=True)
class SliceCast:
    """A slice to be brought from one host to all devices of some others."""

    nbytes: int
    """Size of the slice. Invariant: >= 1."""
    num_hosts: int
    """Receiver hosts. Invariant: >= 1."""
    num_devices: int = 1
    """Devices on each receiver host. Invariant: >= 1."""
    rate_bytes_per_s: float = 1.0
    """What the slowest NIC among them carries. Invariant: > 0."""
    latency_s: float = 0.0
    """Time of a message besides its bytes. Invariant: >= 0."""
    chunk_bytes: int | None = None
    """Largest message; None for no limit."""

    def __post_init__(self) -> None:
        if min(self.nbytes, self.num_hosts, self.num_devices) < 1 or self.rate_bytes_per_s <= 0 or self.latency_s < 0:
            raise PlanError(
                f"comparing ways to move a slice: found {self}, expected at least one byte, host and device, a rate "
                "above 0 and a latency of at least 0; correct the description"
            )

    @property
    def wire_s(self) -> float:
        """Time of the bytes alone through one NIC."""
        return self.nbytes / self.rate_bytes_per_s

    def num_messages(self, num_parts: int = 1) -> int:
        """Messages that ``num_parts`` equal parts of the slice make."""
        if self.chunk_bytes is None:
            return num_parts
        return num_parts * math.ceil(self.nbytes / num_parts / self.chunk_bytes)


@dataclass(frozen=True, slots=True)
class Cost:
    """One way and what it costs."""

    seconds: float
    num_chunks: int


def cost_of(strategy: str, problem: SliceCast) -> Cost:
    """The cost of one way; `PlanError` for a name that is not in the table.

    >>> cost_of("chain", SliceCast(nbytes=1 << 30, num_hosts=3, latency_s=1000.0)).num_chunks
    1465
    """
    if strategy not in COSTS:
        raise PlanError(f"finding the cost of strategy {strategy!r}: expected one of {', '.join(COSTS)}")
    return COSTS[strategy](problem)


def tree_depth(num_hosts: int) -> int:
    """Rounds until everyone has it when the number of those who have it doubles in each."""
    return num_hosts.bit_length()


def two_tree_delay(num_hosts: int) -> int:
    """Chunk times from the first chunk's start to the last one's arrival, besides one for each chunk."""
    return 2 * tree_depth(num_hosts) - 2


def best_num_chunks(problem: SliceCast, delay: int) -> int:
    """Chunks for which ``(K + delay) * (w / K + a)`` is smallest, within what chunks may measure."""
    fewest = problem.num_messages()
    most = max(fewest, problem.nbytes // MIN_CHUNK_BYTES, 1)
    if delay == 0:
        return fewest
    if problem.latency_s == 0:
        return min(max(CHUNKS_PER_DELAY * delay, fewest), most)
    best = math.sqrt(delay * problem.wire_s / problem.latency_s)
    return max(round(min(best, most)), fewest)


def _send_recv(problem: SliceCast) -> Cost:
    num = problem.num_messages()
    return Cost(problem.num_hosts * problem.num_devices * (num * problem.latency_s + problem.wire_s), num)


def _local_allgather(problem: SliceCast) -> Cost:
    num = problem.num_messages(problem.num_devices)
    return Cost(problem.num_hosts * (num * problem.latency_s + problem.wire_s), num)


def _global_allgather(problem: SliceCast) -> Cost:
    hosts = problem.num_hosts
    num = problem.num_messages(hosts * problem.num_devices)
    hop_s = num / hosts * problem.latency_s + problem.wire_s / hosts
    return Cost((2 * hosts - 1) * hop_s, num)


def _tree(problem: SliceCast) -> Cost:
    num = problem.num_messages()
    return Cost(tree_depth(problem.num_hosts) * (num * problem.latency_s + problem.wire_s), num)


def _chain(problem: SliceCast) -> Cost:
    return _pipeline(problem, problem.num_hosts - 1)


def _two_trees(problem: SliceCast) -> Cost:
    return _pipeline(problem, two_tree_delay(problem.num_hosts))


def _pipeline(problem: SliceCast, delay: int) -> Cost:
    num = best_num_chunks(problem, delay)
    return Cost((num + delay) * (problem.wire_s / num + problem.latency_s), num)


COSTS: Mapping[str, Callable[[SliceCast], Cost]] = {
    "send_recv": _send_recv,
    "tree": _tree,
    "chain": _chain,
    "two_trees": _two_trees,
    "local_allgather": _local_allgather,
    "global_allgather": _global_allgather,
}
"""Every way by its name, the simpler one first."""
