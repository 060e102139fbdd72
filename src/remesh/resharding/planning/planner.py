"""Planner: from the description of moves to a checked plan.

Algorithm:

1. Unit tasks of all moves (`tasks`), and from them the lower bound (`bound`), on the links that there are (`network`).
2. Slices of all tensors with equal givers and takers become one stream; streams with equal owner and receiver hosts
   become one host group (`fusion`).
3. Bytes of each group are shared among the hosts that can send them, and routed (`senders`, `trees`).
4. Streams are cut into chunks (`stream`), chunks become sendings between ranks (`relay`).
5. Sendings get priorities (`order`), from them times and rounds (`timeline`). Where there are too many for that, chunks
   and hops become rows between hosts instead (`host_rows`), which have their rounds by rule.
6. The plan, which is rows either way (`rows`), checks itself (`plan`, `check`).

Where sides are grids whose pieces are wanted within one host each, and there are very many slices, none of this is
done: all of it follows from one rule (`grid_rows`), unless that loads a host with more than the bound.

Other strategies (`paper`) replace steps 3 to 5. ``"auto"`` is the above, unless so little is moved that latency counts,
in so few messages that each is scheduled: then it is what the simulator finds fastest among it, a binomial tree and
direct sending. They are not tried where the simulated time is what no order of whole messages beats.

The plan is a function of its arguments alone: no clock, no chance, no order of a set. Every rank computes it from
the same description and compares the digest before anything moves.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from remesh.foundation.collector import collector_at_rest
from remesh.foundation.errors import PlanError
from remesh.foundation.options import check_option
from remesh.layout import Box, Layout
from remesh.resharding.model.bound import Bound, HostGroup, bound_of_groups, bound_of_loads
from remesh.resharding.model.network import Network
from remesh.resharding.model.program import Copy
from remesh.resharding.model.slices import NOBODY, Slices
from remesh.resharding.model.tasks import Missing, TensorMove, slices_of
from remesh.resharding.planning.plan import Plan
from remesh.resharding.planning.simulate import simulate_plan
from remesh.resharding.schedule.chunks import Chunks
from remesh.resharding.schedule.fusion import Fused, fuse
from remesh.resharding.schedule.grid_rows import GridRows
from remesh.resharding.schedule.host_rows import compute_waiting, make_host_rows
from remesh.resharding.schedule.paper import CHUNKS_PER_DELAY, STRATEGIES, Setting
from remesh.resharding.schedule.rows import Rows
from remesh.resharding.schedule.senders import Route, split_senders
from remesh.resharding.schedule.timeline import columns_of_sendings, schedule_in_time
from remesh.resharding.schedule.trees import depths_of

DEFAULT_CHUNK_BYTES = 4 << 20
"""Largest message: long enough that its latency does not show, short enough to stage a window of them."""
AUTO = "auto"
"""Name of the strategy that chooses by itself."""
SPLIT = "split"
"""Name of the planner's own strategy."""
MIN_CHUNK_BYTES = 64
"""Smallest allowed largest message; several elements of any dtype fit."""
_RELAY_CHUNK_BYTES = 128 << 10
"""Chunks on a route with relays are not cut finer than this for the sake of its pipeline."""
_HOST_RELAY_CHUNK_BYTES = 2 << 20
"""The same where nothing leaves its host: a message costs processors as much as several 100 KiB, and no link waits."""
_TURN_BYTES = 256 << 10
"""Chunks are not cut finer than this for the sake of hosts that serve several others in turn."""
_NUM_TURNS = 16
"""Chunks that the busiest NIC carries at the least where hosts take turns: a host that waits for one then waits for a
small fraction of the whole."""
_MAX_TIMED = 20_000
"""Up to this many messages the planner schedules each one in time. More messages are planned as flows, which is
faster."""
_MAX_TIMED_BY_HOSTS = 100_000
"""Messages are planned as flows, too, if their number times that of the hosts is above this, and traffic is even."""
_MAX_WAITING = 1.1
"""Traffic counts as even if, planned as flows, no host takes longer than its own work times this."""
_MAX_NAMED = 1 << 13
"""More slices are not named, where they may go by a rule."""
_FEW_LATENCIES = 100
"""A bound below this many latencies makes ``"auto"`` compare with strategies that need fewer messages on the way."""
_FOR_LATENCY = ("tree", "send_recv")
_ALMOST_ONE = 1 - 1e-9
_TOO_MANY_BYTES = 1 << 62


@collector_at_rest()
def plan_reshard(
    moves: Sequence[TensorMove],
    host_of: Mapping[int, str],
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    missing: Missing = Missing.REFUSE,
    network: Network | None = None,
    strategy: str = AUTO,
) -> Plan:
    """The plan that performs all moves; the same on every rank for the same arguments.

    ``host_of`` maps every rank of the group to its host: ranks with equal hosts share its NICs and copy freely.
    ``chunk_bytes`` is the size of the largest message. ``network`` gives the rates of hosts and racks; without it all
    hosts count as equal. ``strategy`` is ``"split"``, this planner's own, or a name of
    `remesh.resharding.schedule.paper`; ``"auto"`` is the former, or what the simulator finds faster where latency
    counts. Raises `PlanError` for what cannot be moved.

    >>> from remesh.layout import Box, Shard
    >>> src, dst = (Layout((8,), (Shard(rank, Box((0,), (8,))),), "float32") for rank in (0, 1))
    >>> plan = plan_reshard([TensorMove("w", src, dst)], {0: "a", 1: "b"})
    >>> plan.bytes_by_pair, plan.lower_bound_bytes, plan.certified_ratio
    ({(0, 1): 32}, 32, 1.0)
    """
    check_request(f"planning {len(moves)} moves", chunk_bytes, strategy)
    check_option("planning", "missing", missing, Missing)
    check_option("planning", "network", network, Network | None)
    moves = _in_order(moves)
    check_hosts(moves, host_of)
    if network is not None:
        network.check_hosts(host_of.values(), f"planning {len(moves)} moves")
    _check_sizes(moves)
    host_of = dict(sorted(host_of.items()))
    if strategy in (AUTO, SPLIT) and (by_rule := _find_rule(moves, host_of, chunk_bytes, network)) is not None:
        uplinks = by_rule.uplink_loads(network) if network is not None and network.racks else None
        bound = bound_of_loads(by_rule.loads.owned, by_rule.loads.taken, network, uplinks)
        plan = Plan(moves, by_rule, tuple(by_rule.copies()), bound, network)
        # Replicas on several hosts that take turns may still not share the work evenly.
        if plan.certified_ratio * _ALMOST_ONE <= 1:
            return plan
    slices = slices_of(moves, missing)
    fused = fuse(moves, slices, host_of)
    sizes = dict(zip(fused.groups, fused.group_bytes, strict=True))
    problem = _Problem(moves, fused, bound_of_groups(sizes, network), host_of, chunk_bytes, network)
    copies = tuple(_copies(slices))

    def plan_by(name: str) -> Plan:
        return Plan(moves, _schedule(name, problem), copies, problem.bound, network)

    if strategy != AUTO:
        return plan_by(strategy)
    ours = plan_by(SPLIT)
    if not _latency_counts(problem) or ours.rows.num_messages > _MAX_TIMED:
        return ours
    plans = [(simulate_plan(ours).total_s, 0, ours)]
    if plans[0][0] > _least_s(problem) / _ALMOST_ONE:
        for number, name in enumerate(_FOR_LATENCY):
            other = plan_by(name)
            plans.append((simulate_plan(other).total_s, number + 1, other))
    return min(plans)[-1]


@dataclass(frozen=True, slots=True)
class _Problem:
    """What is to be moved, where, and in what portions."""

    moves: Sequence[TensorMove]
    fused: Fused
    """What has to travel."""
    bound: Bound
    host_of: Mapping[int, str]
    chunk_bytes: int
    network: Network | None


def _latency_counts(problem: _Problem) -> bool:
    """Whether so little is to be moved that the number of messages on the way may matter more than its bytes."""
    seconds, network = problem.bound.seconds, problem.network
    return seconds is not None and network is not None and seconds < _FEW_LATENCIES * network.latency_s


def _least_s(problem: _Problem) -> float:
    """Time that no schedule of these streams beats where every message takes its latency.

    Each stream comes into each of its receiver hosts in one message or more, which occupy a NIC there.
    """
    fused, network = problem.fused, problem.network
    assert network is not None
    count: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    of_group = zip(fused.groups, np.diff(fused.first_stream).tolist(), fused.group_bytes, strict=True)
    for group, num_streams, size in of_group:
        for host in group.receivers:
            count[host] = count.get(host, 0) + num_streams
            nbytes[host] = nbytes.get(host, 0) + size
    links = network.hosts
    return max(
        (
            (count[host] * network.latency_s + nbytes[host] / links[host].rate_bytes_per_s) / links[host].num_nics
            for host in count
        ),
        default=0.0,
    )


def _schedule(strategy: str, problem: _Problem) -> Rows:
    """The rows of all messages, by one strategy."""
    host_of, network = problem.host_of, problem.network
    if strategy == SPLIT:
        routes, chunk_bytes = _find_ways(problem)
        made = make_host_rows(problem.fused, routes, host_of, chunk_bytes)
        num_messages, num_hosts = made.untimed.num_messages, len(made.untimed.hosts)
        if num_messages > _MAX_TIMED or (
            num_messages * num_hosts > _MAX_TIMED_BY_HOSTS and compute_waiting(made.rows) <= _MAX_WAITING
        ):
            return made.rows
        return schedule_in_time(made, network)
    routed = STRATEGIES[strategy](problem.fused.as_streams, Setting(host_of, problem.chunk_bytes, network))
    chunks = Chunks.of(routed.chunks, tuple(move.src.ndim for move in problem.moves))
    return Rows.of_messages(host_of, chunks, columns_of_sendings(routed.sendings, routed.rounds))


def check_request(doing: str, chunk_bytes: int, strategy: str) -> None:
    """Raise `PlanError` for a size or a strategy that no plan can be made with, `OptionError` for other types."""
    check_option("planning", "chunk_bytes", chunk_bytes, int)
    check_option("planning", "strategy", strategy, str)
    if chunk_bytes < MIN_CHUNK_BYTES:
        raise PlanError(
            f"{doing}: chunk_bytes is {chunk_bytes}, expected at least {MIN_CHUNK_BYTES}; leave it "
            f"at its default of {DEFAULT_CHUNK_BYTES} unless memory is short"
        )
    if strategy not in (AUTO, SPLIT, *STRATEGIES):
        raise PlanError(
            f"{doing}: strategy {strategy!r} is unknown, expected one of "
            f"{sorted({AUTO, SPLIT, *STRATEGIES})}; leave it at {AUTO!r} to let Remesh choose"
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


def check_hosts(moves: Sequence[TensorMove], host_of: Mapping[int, str]) -> None:
    """Raise `PlanError` unless every rank of the moves has a host."""
    layouts = {id(layout): layout for move in moves for layout in (move.src, move.dst)}
    homeless = sorted({int(rank) for layout in layouts.values() for rank in layout.holders} - host_of.keys())
    if homeless:
        raise PlanError(
            f"planning {len(moves)} moves: rank {homeless[0]} sends or receives but host_of has no host for it (nor "
            "for "
            f"{len(homeless) - 1} more ranks), expected one for every rank of the group; name its host"
        )


def _check_sizes(moves: Sequence[TensorMove]) -> None:
    total = sum(move.src.nbytes for move in moves)
    if total >= _TOO_MANY_BYTES:
        raise PlanError(
            f"planning {len(moves)} moves: the tensors have {total} bytes in total, expected fewer than "
            f"{_TOO_MANY_BYTES}, so that sums of sizes fit into 64 bits; move them in several plans"
        )


def _copies(slices: Slices) -> Iterator[Copy]:
    found: dict[int, list[tuple[Box, tuple[int, ...]]]] = {}
    for tensor, number in enumerate(slices.block_of):
        if number not in found:
            block = slices.blocks[number]
            rows = np.flatnonzero(block.copiers != NOBODY)
            sets = block.copiers[rows].tolist()
            found[number] = [(box, slices.rank_sets[n]) for box, n in zip(block.boxes(rows), sets, strict=True)]
        for box, ranks in found[number]:
            yield Copy(tensor, box, ranks)


def _find_rule(
    moves: tuple[TensorMove, ...], host_of: Mapping[int, str], chunk_bytes: int, network: Network | None
) -> GridRows | None:
    """The rule by which everything goes, where there are too many slices to name them and a rule can do it."""
    if any(move.src.partial is not None for move in moves):
        return None
    if sum(len(move.src.atoms) * len(move.dst.atoms) for move in moves) <= _MAX_NAMED:
        return None
    made = GridRows.of(moves, host_of, more_than=_MAX_NAMED, most_bytes=chunk_bytes)
    # Replicas in several racks should give within theirs, which the rule does not know.
    return None if made is not None and network is not None and network.racks and made.has_replicas else made


def _find_ways(problem: _Problem) -> tuple[tuple[tuple[Route, ...], ...], int]:
    """For each group routes that keep the busiest link at the bound, and the largest message."""
    fused, bound, host_of = problem.fused, problem.bound, problem.host_of
    sizes = list(zip(fused.groups, fused.group_bytes, strict=True))
    split = split_senders(sizes, bound.bytes if bound.exact is None else bound.exact, problem.network)
    num_alike = Counter(group.receivers for group in fused.groups)
    # All alike: a long message in the way of short ones would hold up those that wait to pass them on.
    crowds = [_crowd(ranks, host_of) for ranks in fused.rank_sets]
    first_takers = fused.takers.take(fused.first_stream[:-1]).tolist()
    lags = {
        _lag(route, num_alike[group.receivers]) + crowds[takers]
        for group, routes, takers in zip(fused.groups, split.routes, first_takers, strict=True)
        for route in routes
    }
    chunk_bytes = min((_chunk_size(lag, problem) for lag in sorted(lags)), default=problem.chunk_bytes)
    if _take_turns(fused.groups):
        chunk_bytes = min(chunk_bytes, max(bound.bytes // _NUM_TURNS, _TURN_BYTES))
    return split.routes, chunk_bytes


def _take_turns(groups: Sequence[HostGroup]) -> bool:
    """Whether some host gives to, or takes from, more than one set of others."""
    serving = Counter(host for group in groups for host in group.owners)
    served = Counter(host for group in groups for host in group.receivers)
    return max((*serving.values(), *served.values()), default=0) > 1


def _lag(route: Route, num_alike: int) -> int:
    """How many hops the last receiver lags behind the first, less what chains that begin elsewhere make up for."""
    if len(route.hops) < 2:
        return 0
    depth = max(depths_of(route.hops).values())
    return depth - 1 if num_alike < depth else 0


def _crowd(takers: Sequence[int], host_of: Mapping[int, str]) -> int:
    """1 when ranks of one host pass the stream on among them, else 0: that is quick, and fills but one more step."""
    return int(len({host_of[rank] for rank in takers}) < len(takers))


def _chunk_size(lag: int, problem: _Problem) -> int:
    """Largest chunk on a route: finer where it is relayed, so that its relays work at the same time.

    With ``K`` chunks a chain takes ``(K + lag) * (bound / K + latency)``; best is ``K = sqrt(lag * bound / latency)``.
    """
    bound, network = problem.bound, problem.network
    if not lag:
        return problem.chunk_bytes
    if network is not None and network.latency_s and bound.seconds:
        num_chunks = max(1, round(min(math.sqrt(lag * bound.seconds / network.latency_s), bound.bytes)))
        return min(problem.chunk_bytes, max(bound.bytes // num_chunks, MIN_CHUNK_BYTES))
    # Where nothing leaves its host, no NIC is busy, and the bound is of no bytes.
    nbytes = bound.bytes or max(problem.fused.group_bytes)
    least = _RELAY_CHUNK_BYTES if bound.bytes else _HOST_RELAY_CHUNK_BYTES
    return min(problem.chunk_bytes, max(nbytes // (CHUNKS_PER_DELAY * lag), least))
