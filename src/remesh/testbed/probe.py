"""Measurement of the links between hosts, with the messages that will use them later.

Every rank of a group calls `probe`; ranks with one host name share a host, and the lowest of them measures for it. In
steps, one host at a time so that nothing disturbs what is measured:

1. *Latency*: half of a round trip of one byte to the next host; the median of some, and of all hosts.
2. *Out*: a host sends to all others at once. That fills its NIC even when each of the others is slower.
3. *In*: all others send to it.
4. *Local*: hosts with two ranks or more send from one to another, inside the host.

Every time is taken on one host, from its first byte to an answer, so clocks need not agree. A short first try, and a
second one, show how many bytes each peer takes in the time that was asked for. With two hosts only the slower of both
can be seen.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from remesh.foundation.errors import ConfigError
from remesh.foundation.thread_pool import PooledExecutor

_NAME_BYTES = 256
_FIRST_BYTES = 1 << 20
_NUM_ROUND_TRIPS = 15
_MAX_BYTES = 1 << 30
_NUM_TRIES = 3
_MAX_PEERS = 16
"""A host talks to so many others at once, the next ones in order; enough to fill its NIC."""
_BLOCK_BYTES = 1 << 20
_TAG = 0x9E7


@dataclass(frozen=True, slots=True)
class HostRates:
    """What was measured of one host."""

    host: str
    out_bytes_per_s: float
    """Of the payload: what protocols add is not counted."""
    in_bytes_per_s: float
    local_bytes_per_s: float | None
    """Between two of its ranks; None when it has only one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of all hosts; the same on every rank."""

    hosts: tuple[HostRates, ...]
    latency_s: float


def probe(seconds: float = 0.5) -> Measured:
    """Measure rates and latency between the hosts of the default group.

    Called by every rank of the group; blocks for about five times ``seconds`` for each host. Raises
    `ConfigError` on all ranks when there is only one host.
    """
    hosts = _gather_hosts()
    speakers = {host: hosts.index(host) for host in hosts}
    if len(speakers) < 2:
        raise ConfigError(
            f"measuring links: found {len(hosts)} ranks on {len(speakers)} host, expected two hosts or more; start one "
            "rank on each host"
        )
    ranks = list(speakers.values())
    latency_s = statistics.median(_agree(_round_trip(*pair), pair[0]) for pair in _neighbours(ranks))
    rates = []
    for host, root in speakers.items():
        at = ranks.index(root)
        others = [*ranks[at + 1 :], *ranks[:at]][:_MAX_PEERS]
        out = _rate(root, others, _send, seconds)
        into = _rate(root, others, _receive, seconds)
        beside = [rank for rank, name in enumerate(hosts) if name == host and rank != root]
        local = _rate(root, beside[:1], _send, seconds) if beside else None
        rates.append(HostRates(host, out, into, local))
    return Measured(tuple(rates), latency_s)


def _gather_hosts() -> list[str]:
    """Host names of all ranks."""
    name = socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    found = [torch.empty(_NAME_BYTES, dtype=torch.uint8, device="cpu") for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor(list(name), dtype=torch.uint8, device="cpu"))
    return [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in found]


def _neighbours(ranks: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))


def _agree(measured: float, root: int) -> float:
    """What ``root`` measured, on all ranks, once all are through."""
    value = torch.tensor([measured], dtype=torch.float64, device="cpu")
    dist.broadcast(value, root)
    dist.barrier()
    return float(value.item())


def _round_trip(first: int, second: int) -> float:
    """Seconds of one way, on rank ``first``; 0 elsewhere."""
    rank, byte = dist.get_rank(), torch.zeros(1, dtype=torch.uint8, device="cpu")
    times = []
    for _ in range(_NUM_ROUND_TRIPS if rank in (first, second) else 0):
        started_s = time.perf_counter()
        if rank == first:
            dist.send(byte, second, tag=_TAG)
            dist.recv(byte, second, tag=_TAG)
        else:
            dist.recv(byte, first, tag=_TAG)
            dist.send(byte, first, tag=_TAG)
        times.append((time.perf_counter() - started_s) / 2)
    return statistics.median(times) if rank == first else 0.0


def _rate(root: int, peers: Sequence[int], act: _Transmission, seconds: float) -> float:
    """Bytes per second through the root, on all ranks."""
    best = 0.0
    sizes = [max(_FIRST_BYTES // len(peers), 1)] * len(peers)
    for _ in range(_NUM_TRIES):
        taken_s = [max(_agree(each, root), 1e-6) for each in _transfer(root, dict(zip(peers, sizes, strict=True)), act)]
        best = max(best, sum(sizes) / max(taken_s))
        # A slower peer gets less, so that in the next try all end at once and the root is busy throughout.
        rates = [size / each for size, each in zip(sizes, taken_s, strict=True)]
        sizes = [max(min(int(rate * seconds), _MAX_BYTES // len(peers)), 1) for rate in rates]
    return best


def _transfer(root: int, size_of: Mapping[int, int], act: _Transmission) -> list[float]:
    """Move these bytes between the root and each peer, all at once; on the root, the seconds each peer took."""
    rank = dist.get_rank()
    if rank == root:
        with PooledExecutor(len(size_of), "probe") as pool:
            return list(pool.map(lambda peer: act(peer, size_of[peer], is_root=True), size_of))
    if rank in size_of:
        act(root, size_of[rank], is_root=False)
    return [0.0] * len(size_of)


class _Transmission(Protocol):
    def __call__(self, other: int, num_bytes: int, *, is_root: bool) -> float: ...


def _send(other: int, num_bytes: int, *, is_root: bool) -> float:
    """The root sends, the peer answers with one byte when it has everything; the seconds it took."""
    started_s, byte = time.perf_counter(), torch.zeros(1, dtype=torch.uint8, device="cpu")
    if is_root:
        _move(dist.isend, other, num_bytes)
        dist.recv(byte, other, tag=_TAG)
    else:
        _move(dist.irecv, other, num_bytes)
        dist.send(byte, other, tag=_TAG)
    return time.perf_counter() - started_s


def _receive(other: int, num_bytes: int, *, is_root: bool) -> float:
    """The peer sends, from the moment that it gets one byte of the root; the seconds it took."""
    started_s, byte = time.perf_counter(), torch.zeros(1, dtype=torch.uint8, device="cpu")
    if is_root:
        dist.send(byte, other, tag=_TAG)
        _move(dist.irecv, other, num_bytes)
    else:
        dist.recv(byte, other, tag=_TAG)
        _move(dist.isend, other, num_bytes)
    return time.perf_counter() - started_s


def _move(act: Callable[..., dist.Work | None], other: int, num_bytes: int) -> None:
    """Post all messages of this many bytes, and wait for them."""
    block = torch.zeros(min(num_bytes, _BLOCK_BYTES), dtype=torch.uint8, device="cpu")
    works = [act(block[: num_bytes - at], other, tag=_TAG) for at in range(0, num_bytes, _BLOCK_BYTES)]
    for work in works:
        if work is not None:
            work.wait()
