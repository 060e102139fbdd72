"""Sender choice: sharing the work among replicas, whole or in fractions.

Definitions. An *item* is something that one of several *candidates* must do; its *weight* is what it costs, in
bytes. The *load* of a candidate is the sum of the weights it was given. The *choices* of a host-level task are the
hosts that hold it (owners) and those that want it (receivers, who can pass it on).

Two rules, for two kinds of work:

- `assign_whole`: items that cannot be cut (a file entry has one writer). Longest first, each to its least loaded
  candidate: Graham's LPT rule, at most 4/3 of the best when everyone may do everything; with restricted
  candidates no such promise holds, but ties and order are fixed, so every rank gets the same answer.
- `split_senders`: bytes, which can be cut anywhere. The smallest possible largest load is the optimum of a linear
  program; here it is found exactly, in integers, as a series of maximum flows (see `flow`).

Sources: Graham, "Bounds on multiprocessing timing anomalies" (1969); Zhuang et al., arXiv 2211.05322, section 3.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from remesh.foundation.errors import PlanError
from remesh.resharding.model.bound import HostGroup
from remesh.resharding.model.flow import Work, spread
from remesh.resharding.model.network import Network
from remesh.resharding.schedule.trees import Hop, chain_hops, rotate, two_tree_hops

_MAX_EDGES = 1024
"""Up to this many pairs of leg and host the linear program holds all sendings."""
_MAX_CHAIN = 8
"""Receivers that a chain may have more than there are chains; beyond, its pipeline fills too slowly."""


def assign_whole(
    weights: Sequence[int],
    candidates: Sequence[Sequence[int]],
    initial_load: Mapping[int, int] | None = None,
) -> list[int]:
    """Choose a candidate for each item so that loads are balanced; the same choice on every rank.

    ``weights[i]`` is the cost of item ``i`` in bytes, ``candidates[i]`` the ids that may do it, ``initial_load`` what
    ids have to do already. Ties go to the lowest id, equal weights keep their order. Raises `PlanError` for an
    item without candidates.

    >>> assign_whole([5, 3, 3], [[0, 1], [0, 1], [0, 1]])
    [0, 1, 1]
    """
    if len(weights) != len(candidates):
        raise PlanError(
            f"assigning {len(weights)} items: found candidates for {len(candidates)}; give each item its own list"
        )
    load = dict(initial_load or {})
    chosen = [-1] * len(weights)
    for item in sorted(range(len(weights)), key=lambda item: (-weights[item], item)):
        if not candidates[item]:
            raise PlanError(
                f"assigning {len(weights)} items: item {item} of {weights[item]} bytes has no candidate, expected at "
                "least one; give each item at least one holder"
            )
        chosen[item] = min(candidates[item], key=lambda who: (load.get(who, 0), who))
        load[chosen[item]] = load.get(chosen[item], 0) + weights[item]
    return chosen


@dataclass(frozen=True, slots=True)
class Route:
    """A run of a group's bytes, and the hops by which it reaches every receiver host."""

    start: int
    """First byte in the group's stream."""
    stop: int
    """One past the last byte. Invariant: the routes of a group tile its stream in order."""
    hops: tuple[Hop, ...]
    """One hop into each receiver host. Invariant: the giver of a hop owns the bytes or got them by an earlier hop."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """All bytes of all groups, shared among the hosts that can send them."""

    load: Fraction
    """What the busiest host sends or receives, in units of time; in bytes when all rates are 1."""
    routes: tuple[tuple[Route, ...], ...]
    """For each group the routes of its bytes."""

    @property
    def load_bytes(self) -> int:
        """The load rounded up, which is what whole bytes allow when all rates are 1."""
        return math.ceil(self.load)


def split_senders(
    groups: Sequence[tuple[HostGroup, int]], at_least: int | Fraction = 0, network: Network | None = None
) -> Sharing:
    """Routes for the bytes of each group such that the largest load of a host is as small as possible.

    ``groups`` are pairs of host group and bytes, ``at_least`` a load that is known to be unavoidable. Each byte of
    a group with ``k`` receivers is sent ``k`` times: first by an owner, then by owners or by receivers that have it.

    1. With racks, divide every group into *legs*: the receivers in the rack of an owner, who get it from there, and
       behind them other racks, one after the other.
    2. Find the bytes that each host sends for each leg (`remesh.resharding.model.flow.spread`).
    3. Write the leg's bytes as ``k`` rows of equal length. Fill the first row with owners, the others with all
       that is left, each host as one run that may wrap into the next row (McNaughton's rule).
    4. Cut all rows wherever a run begins or ends. Between two cuts the column names the ``k`` sendings of those
       bytes: the route. Receivers that have a sending to do are served first.

    At scale, and with racks, only first sendings are shared out, over all groups with the same owners at once, and
    receivers pass on in chains and trees of `trees`. That is as good when no host both owns and receives.
    """
    if all(len(group.owners) == len(group.receivers) == 1 for group, _ in groups):
        return _split_pairs(groups, at_least, network)
    legs = [_legs_of(group, network) for group, _ in groups]
    flat = [(leg, nbytes) for group_legs, (_, nbytes) in zip(legs, groups, strict=True) for leg in group_legs]
    rates = None if network is None else network.host_rates()
    num_edges = sum(len(leg.owners) + len(leg.receivers) for leg, _ in flat)
    rack_of = (
        {} if network is None else {host: network.rack_of(host) for host in network.hosts if network.rack_of(host)}
    )
    if num_edges <= _MAX_EDGES and not rack_of:
        load, found = _split_exactly(flat, at_least, rates)
    else:
        load, found = _split_in_order(flat, at_least, rates, rack_of)
    by_leg = iter(found)
    routes = []
    for group_legs, (_, nbytes) in zip(legs, groups, strict=True):
        routes.append(_overlay([next(by_leg) for _ in group_legs]) if group_legs else (Route(0, nbytes, ()),))
    return Sharing(load, tuple(routes))


def _split_pairs(groups: Sequence[tuple[HostGroup, int]], at_least: int | Fraction, network: Network | None) -> Sharing:
    """Assign every byte to its only owner and its only receiver."""
    total: dict[str, int] = {}
    routes = []
    for group, nbytes in groups:
        owner = group.owners[0]
        total[owner] = total.get(owner, 0) + nbytes
        routes.append((Route(0, nbytes, (Hop(owner, group.receivers[0]),)),))
    rates = None if network is None else network.host_rates()
    loads = [Fraction(nbytes) / (1 if rates is None else rates[host]) for host, nbytes in total.items()]
    return Sharing(max([Fraction(at_least), *loads]), tuple(routes))


def _legs_of(group: HostGroup, network: Network | None) -> list[HostGroup]:
    """The group itself, or its parts by rack; receivers in the order of their racks."""
    if not group.receivers:
        return []
    if network is None or not network.racks:
        return [group]
    owners_in: dict[str, list[str]] = {}
    for host in group.owners:
        if (rack := network.rack_of(host)) is not None:
            owners_in.setdefault(rack, []).append(host)
    inside: dict[str, list[str]] = {}
    outside = []
    for host in group.receivers:
        rack = network.rack_of(host)
        if rack is not None and rack in owners_in:
            inside.setdefault(rack, []).append(host)
        else:
            outside.append(host)
    if not inside:
        return [HostGroup(group.owners, tuple(sorted(outside, key=lambda host: (network.rack_of(host) or "", host))))]
    # A receiver in an owner's rack passes it on to the other racks, so that owners need not send it again.
    foreign: dict[str, list[str]] = {}
    for host in outside:
        foreign.setdefault(network.rack_of(host) or host, []).append(host)
    chains = sorted(inside.items())
    for number, (_, hosts) in enumerate(sorted(foreign.items())):
        chains[number % len(chains)][1].extend(hosts)
    return [HostGroup(tuple(owners_in[rack]), tuple(hosts)) for rack, hosts in chains]


Rates = Mapping[str, Fraction] | None


def _split_exactly(
    legs: Sequence[tuple[HostGroup, int]], at_least: int | Fraction, rates: Rates
) -> tuple[Fraction, list[tuple[Route, ...]]]:
    """All sendings of all legs shared out in one linear program."""
    items = [
        Work(nbytes, len(leg.receivers), leg.owners, leg.receivers if len(leg.receivers) > 1 else ())
        for leg, nbytes in legs
    ]
    shares = spread(items, at_least, rates)
    turns = _turns(legs)
    return shares.load, [
        _routes_of(HostGroup(leg.owners, rotate(leg.receivers, turn)), nbytes, share)
        for (leg, nbytes), turn, share in zip(legs, turns, shares.by_worker, strict=True)
    ]


def _turns(legs: Sequence[tuple[HostGroup, int]]) -> list[int]:
    """The rotation of each leg, so that legs to the same receivers enter at different ones."""
    seen: dict[tuple[str, ...], int] = {}
    turns = []
    for leg, _ in legs:
        turns.append(seen.get(leg.receivers, 0))
        seen[leg.receivers] = turns[-1] + 1
    return turns


def _split_in_order(
    legs: Sequence[tuple[HostGroup, int]],
    at_least: int | Fraction,
    rates: Rates,
    rack_of: Mapping[str, str | None],
) -> tuple[Fraction, list[tuple[Route, ...]]]:
    """First sendings shared out over owners; chains and trees for all others. With racks, chains alone."""
    by_owners: dict[tuple[str, ...], list[int]] = {}
    for number, (leg, _) in enumerate(legs):
        by_owners.setdefault(leg.owners, []).append(number)
    items = [Work(sum(legs[n][1] for n in numbers), 1, owners) for owners, numbers in by_owners.items()]
    shares = spread(items, at_least, rates)
    first: list[list[_HostRange]] = [[] for _ in legs]
    for numbers, share in zip(by_owners.values(), shares.by_worker, strict=True):
        if len(share) == 1:
            (host,) = share
            for number in numbers:
                first[number].append(_HostRange(host, 0, legs[number][1]))
            continue
        left = deque(share.items())
        for number in numbers:
            at, nbytes = 0, legs[number][1]
            while at < nbytes:
                host, able = left[0]
                stop = min(nbytes, at + able)
                first[number].append(_HostRange(host, at, stop))
                left[0] = (host, able - (stop - at))
                if able == stop - at:
                    left.popleft()
                at = stop
    turns = _turns(legs)
    num_alike = {leg.receivers: turn + 1 for (leg, _), turn in zip(legs, turns, strict=True)}
    routes: list[tuple[Route, ...]] = []
    for (leg, _), turn, runs in zip(legs, turns, first, strict=True):
        if len(leg.receivers) == 1:
            hops = [(Hop(run.host, leg.receivers[0]),) for run in runs]
            routes.append(tuple(Route(run.start, run.stop, hop) for run, hop in zip(runs, hops, strict=True)))
            continue
        receivers = _rotate_racks(leg, turn, rack_of)
        found: list[Route] = []
        for run in runs:
            if rack_of or len(receivers) - num_alike[leg.receivers] <= _MAX_CHAIN:
                found.append(Route(run.start, run.stop, chain_hops(run.host, receivers)))
                continue
            one, other = two_tree_hops(run.host, receivers)
            middle = (run.start + run.stop) // 2
            found += [
                Route(a, b, hops) for a, b, hops in ((run.start, middle, one), (middle, run.stop, other)) if a < b
            ]
        routes.append(tuple(found))
    return shares.load, routes


def _rotate_racks(leg: HostGroup, turn: int, rack_of: Mapping[str, str | None]) -> tuple[str, ...]:
    """The receivers from another one on, but still rack after rack, and the owners' own rack first."""
    if not rack_of:
        return rotate(leg.receivers, turn)
    racks = [tuple(hosts) for _, hosts in itertools.groupby(leg.receivers, key=lambda host: rack_of.get(host, host))]
    num_own = int(leg.owners[0] in rack_of and rack_of[leg.owners[0]] == rack_of.get(racks[0][0]))
    others = rotate(racks[num_own:], turn)
    return tuple(host for rack in (*racks[:num_own], *others) for host in rotate(rack, turn // len(racks)))


def _overlay(legs: Sequence[Sequence[Route]]) -> tuple[Route, ...]:
    """The routes of the same bytes to different receivers as one: cut wherever one of them is cut."""
    if len(legs) == 1:
        return tuple(legs[0])
    cuts = sorted({0, *(route.stop for leg in legs for route in leg)})
    at = [0] * len(legs)
    routes = []
    for start, stop in itertools.pairwise(cuts):
        for number, leg in enumerate(legs):
            while leg[at[number]].stop <= start:
                at[number] += 1
        hops = tuple(hop for number, leg in enumerate(legs) for hop in leg[at[number]].hops)
        routes.append(Route(start, stop, hops))
    return tuple(routes)


def _routes_of(group: HostGroup, nbytes: int, share: Mapping[str, int]) -> tuple[Route, ...]:
    rows = _fill_rows(group, nbytes, share)
    cuts = sorted({0, nbytes, *(run.start for row in rows for run in row)})
    routes: list[Route] = []
    at = [0] * len(rows)
    for start, stop in itertools.pairwise(cuts):
        for number, row in enumerate(rows):
            while row[at[number]].stop <= start:
                at[number] += 1
        senders = [row[at[number]].host for number, row in enumerate(rows)]
        hops = _hops(group, senders)
        if routes and routes[-1].hops == hops:
            routes[-1] = Route(routes[-1].start, stop, hops)
        else:
            routes.append(Route(start, stop, hops))
    return tuple(routes)


@dataclass(frozen=True, slots=True)
class _HostRange:
    """Bytes ``start .. stop`` of one row, sent by one host."""

    host: str
    start: int
    stop: int


def _fill_rows(group: HostGroup, nbytes: int, share: Mapping[str, int]) -> list[list[_HostRange]]:
    """``len(receivers)`` rows of ``nbytes`` bytes; the first holds owners only."""
    rows: list[list[_HostRange]] = [[] for _ in group.receivers]
    filled = 0
    for host in (*group.owners, *group.receivers):
        left = share.get(host, 0)
        while left > 0:
            row, start = divmod(filled, nbytes)
            length = min(left, nbytes - start)
            rows[row].append(_HostRange(host, start, start + length))
            filled += length
            left -= length
    return rows


def _hops(group: HostGroup, senders: Sequence[str]) -> tuple[Hop, ...]:
    """A tree over the receivers in which every host sends as often as it is listed; the first listed is an owner."""
    to_do: dict[str, int] = {}
    for host in senders:
        to_do[host] = to_do.get(host, 0) + 1
    relays_first = sorted(group.receivers, key=lambda host: host not in to_do)
    ready = deque(host for host in to_do if host in group.owners)
    hops = []
    for taker in relays_first:
        giver = ready[0]
        to_do[giver] -= 1
        if to_do[giver] == 0:
            ready.popleft()
        if taker in to_do:
            ready.append(taker)
        hops.append(Hop(giver, taker))
    return tuple(hops)
