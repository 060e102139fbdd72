"""How does a state get from one layout to another? Planning, from the description to a checked plan.

Algorithm:

1. Unit tasks of all moves (`tasks`), and from them the lower bound (`bound`).
2. Slices of all tensors with equal givers and takers become one stream; streams with equal owner and receiver hosts
   become one host group.
3. Bytes of each group are shared among the hosts that can send them, and routed (`senders`).
4. Streams are cut into chunks (`stream`), chunks become sendings between ranks (`relay`), sendings get rounds
   (`rounds`).
5. The plan checks itself (`plan`, `check`).

The plan is a function of its arguments alone: no clock, no chance, no order of a set. Every rank computes it from
the same description and compares the digest before anything moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from remesh.errors import PlanError
from remesh.layout import Layout
from remesh.reshard.bound import HostGroup, bound_of_groups, host_group
from remesh.reshard.plan import Plan
from remesh.reshard.program import Copy, Message
from remesh.reshard.relay import Relay
from remesh.reshard.rounds import compute_rounds
from remesh.reshard.senders import Route, split_senders
from remesh.reshard.stream import Chunk, Part, cut_streams
from remesh.reshard.tasks import Missing, TensorMove, UnitTask, compute_tasks

DEFAULT_CHUNK_BYTES = 4 << 20
"""Largest message: long enough that its latency does not show, short enough to stage a window of them."""
MIN_CHUNK_BYTES = 64
"""Smallest allowed largest message; several elements of any dtype fit."""
_RELAY_CHUNK_BYTES = 128 << 10
"""Chunks on a route with relays are not cut finer than this for the sake of its pipeline."""
_CHUNKS_PER_RELAY = 32
"""A chain of ``n`` relays takes about ``1 + n / num_chunks`` times as long as one hop."""


def plan_reshard(
    moves: Sequence[TensorMove],
    host_of: Mapping[int, str],
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    missing: Missing = Missing.REFUSE,
) -> Plan:
    """The plan that performs all moves; the same on every rank for the same arguments.

    ``host_of`` maps every rank of the group to its host: ranks with equal hosts share a NIC and copy freely.
    ``chunk_bytes`` is the size of the largest message. Raises `PlanError` for what cannot be moved.

    >>> from remesh.layout import Box, Shard
    >>> src, dst = (Layout((8,), (Shard(rank, Box((0,), (8,))),), "float32") for rank in (0, 1))
    >>> plan = plan_reshard([TensorMove("w", src, dst)], {0: "a", 1: "b"})
    >>> plan.bytes_by_pair, plan.lower_bound_bytes, plan.certified_ratio
    ({(0, 1): 32}, 32, 1.0)
    """
    if chunk_bytes < MIN_CHUNK_BYTES:
        raise PlanError(
            f"planning {len(moves)} moves: chunk_bytes is {chunk_bytes}, expected at least {MIN_CHUNK_BYTES}; leave it "
            f"at its default of {DEFAULT_CHUNK_BYTES} unless memory is short"
        )
    moves = _in_order(moves)
    _check_hosts(moves, host_of)
    tasks = compute_tasks(moves, missing)
    number_of = {move.name: number for number, move in enumerate(moves)}
    itemsizes = [move.src.itemsize_bytes for move in moves]
    groups = _group(_fuse(tasks, number_of), itemsizes, host_of)
    sizes = {group: sum(stream.nbytes for stream in streams) for group, streams in groups.items()}
    bound = bound_of_groups(sizes)
    split = split_senders(list(sizes.items()), bound.bytes)
    chunks, relay = _cut_and_relay(groups, split.routes, host_of, chunk_bytes)
    rounds = compute_rounds(relay.sendings)
    messages = [
        Message(at, sending.giver, sending.taker, sending.chunk)
        for at, sending in zip(rounds, relay.sendings, strict=True)
    ]
    return Plan(
        moves=moves,
        host_of=host_of,
        chunks=tuple(chunks),
        messages=tuple(sorted(messages, key=lambda message: (message.round, message.giver))),
        copies=tuple(_copies(tasks, number_of)),
        bound=bound,
    )


def _in_order(moves: Sequence[TensorMove]) -> tuple[TensorMove, ...]:
    """The moves by name, with equal layouts made one object, so that what they compute is computed once."""
    moves = sorted(moves, key=lambda move: move.name)
    for before, after in itertools.pairwise(moves):
        if before.name == after.name:
            raise PlanError(
                f"planning {len(moves)} moves: tensor {after.name!r} is there twice, expected once; merge the two "
                "into one move"
            )
    by_id: dict[int, Layout] = {}
    by_value: dict[Layout, Layout] = {}
    ordered = []
    for move in moves:
        for layout in (move.src, move.dst):
            if id(layout) not in by_id:
                by_id[id(layout)] = by_value.setdefault(layout, layout)
        src, dst = by_id[id(move.src)], by_id[id(move.dst)]
        same = src is move.src and dst is move.dst
        ordered.append(move if same else TensorMove(move.name, src, dst))
    return tuple(ordered)


def _check_hosts(moves: Sequence[TensorMove], host_of: Mapping[int, str]) -> None:
    layouts = {id(layout): layout for move in moves for layout in (move.src, move.dst)}
    homeless = sorted({int(rank) for layout in layouts.values() for rank in layout.holders} - host_of.keys())
    if homeless:
        raise PlanError(
            f"planning {len(moves)} moves: rank {homeless[0]} gives or takes but host_of has no host for it (nor for "
            f"{len(homeless) - 1} more ranks), expected one for every rank of the group; name its host"
        )


@dataclass(slots=True)
class _Stream:
    """All parts that the same ranks give to the same ranks."""

    givers: tuple[int, ...]
    takers: tuple[int, ...]
    parts: list[Part]
    nbytes: int


def _fuse(tasks: Sequence[UnitTask], number_of: Mapping[str, int]) -> list[_Stream]:
    """Streams in order of their ranks; tasks without traffic are left out."""
    streams: dict[tuple[tuple[int, ...], tuple[int, ...]], _Stream] = {}
    remote_of: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
    for task in tasks:
        ends = (task.givers, task.takers)
        takers = remote_of.get(ends)
        if takers is None:
            takers = remote_of[ends] = task.remote_takers
        if not takers:
            continue
        stream = streams.get((task.givers, takers))
        if stream is None:
            stream = streams[task.givers, takers] = _Stream(task.givers, takers, [], 0)
        stream.parts.append(Part(number_of[task.tensor], task.box, task.nbytes))
        stream.nbytes += task.nbytes
    return [streams[key] for key in sorted(streams)]


def _group(
    streams: Sequence[_Stream], itemsizes: Sequence[int], host_of: Mapping[int, str]
) -> dict[HostGroup, list[_Stream]]:
    """Streams by host group, in order of their hosts."""
    groups: dict[HostGroup, list[_Stream]] = {}
    for stream in streams:
        # Falling item sizes keep every part aligned in its message; the sort is stable, so tensors stay in order.
        stream.parts.sort(key=lambda part: -itemsizes[part.tensor])
        groups.setdefault(host_group(stream.givers, stream.takers, host_of), []).append(stream)
    return dict(sorted(groups.items()))


def _copies(tasks: Sequence[UnitTask], number_of: Mapping[str, int]) -> Iterator[Copy]:
    copiers_of: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
    for task in tasks:
        ends = (task.givers, task.takers)
        copiers = copiers_of.get(ends)
        if copiers is None:
            copiers = copiers_of[ends] = task.copiers
        if copiers:
            yield Copy(number_of[task.tensor], task.box, copiers)


def _cut_and_relay(
    groups: Mapping[HostGroup, Sequence[_Stream]],
    routes: Sequence[Sequence[Route]],
    host_of: Mapping[int, str],
    chunk_bytes: int,
) -> tuple[list[Chunk], Relay]:
    """Chunks of all streams, and the sendings that bring them where they are wanted."""
    chunks: list[Chunk] = []
    relay = Relay(host_of)
    for streams, group_routes in zip(groups.values(), routes, strict=True):
        sizes = [_chunk_size(route, streams, host_of, chunk_bytes) for route in group_routes]
        for cut in cut_streams([stream.parts for stream in streams], group_routes, sizes):
            stream = streams[cut.stream]
            relay.add_chunk(len(chunks), cut.chunk.nbytes, group_routes[cut.route], stream.givers, stream.takers)
            chunks.append(cut.chunk)
    return chunks, relay


def _chunk_size(route: Route, streams: Sequence[_Stream], host_of: Mapping[int, str], chunk_bytes: int) -> int:
    """Largest chunk on a route: finer where it is relayed, so that its relays work at the same time."""
    depth: dict[str, int] = {}
    for hop in route.hops:
        depth[hop.taker] = depth.get(hop.giver, 0) + 1
    crowd: dict[str, int] = {}
    for rank in streams[0].takers:
        crowd[host_of[rank]] = crowd.get(host_of[rank], 0) + 1
    relays = max(depth.values(), default=0) + max(crowd.values()) - 1
    if relays <= 1 and len(streams[0].takers) == 1:
        return chunk_bytes
    finer = (route.stop - route.start) // (_CHUNKS_PER_RELAY * max(relays, 1))
    return min(chunk_bytes, max(finer, _RELAY_CHUNK_BYTES))
