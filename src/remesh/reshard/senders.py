"""Who sends what? Sharing the work among replicas, whole or in fractions.

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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remesh.errors import PlanError
from remesh.reshard.bound import HostGroup
from remesh.reshard.flow import Work, spread


def assign_whole(
    weights: Sequence[int],
    candidates: Sequence[Sequence[int]],
    initial_load: Mapping[int, int] | None = None,
) -> list[int]:
    """For each item the candidate that does it, so that loads are balanced; the same on every rank.

    ``weights[i]`` is the cost of item ``i`` in bytes, ``candidates[i]`` the ids that may do it, ``initial_load`` what
    ids have to do already. Ties go to the lowest id, equal weights keep their order. Raises `PlanError` for an
    item that nobody may do.

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
                "least one; somebody must hold it"
            )
        chosen[item] = min(candidates[item], key=lambda who: (load.get(who, 0), who))
        load[chosen[item]] = load.get(chosen[item], 0) + weights[item]
    return chosen


@dataclass(frozen=True, slots=True)
class Hop:
    """One sending from host to host."""

    giver: str
    taker: str


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
class Split:
    """All bytes of all groups, shared among the hosts that can send them."""

    load_bytes: int
    """Bytes that the busiest host sends or receives."""
    routes: tuple[tuple[Route, ...], ...]
    """For each group the routes of its bytes."""


def split_senders(groups: Sequence[tuple[HostGroup, int]], bound_bytes: int = 0) -> Split:
    """Routes for the bytes of each group such that the largest load of a host is as small as possible.

    ``groups`` are pairs of host group and bytes, ``bound_bytes`` a load that is known to be unavoidable. Each byte of
    a group with ``k`` receivers is sent ``k`` times: first by an owner, then by owners or by receivers that have it.

    1. Find the bytes that each host sends for each group (`remesh.reshard.flow.spread`).
    2. Write the group's bytes as ``k`` rows of equal length. Fill the first row with owners, the others with all
       that is left, each host as one run that may wrap into the next row (McNaughton's rule).
    3. Cut all rows wherever a run begins or ends. Between two cuts the column names the ``k`` sendings of those
       bytes: the route. Receivers that have a sending to do are served first.
    """
    items = []
    for group, nbytes in groups:
        copies = max(len(group.receivers), 1)
        items.append(Work(nbytes, copies, group.owners, group.receivers if copies > 1 else ()))
    crossing = [item for item, (group, _) in zip(items, groups, strict=True) if group.receivers]
    shares = spread(crossing, at_least=bound_bytes)
    by_worker = iter(shares.by_worker)
    routes = [
        _routes_of(group, nbytes, next(by_worker)) if group.receivers else (Route(0, nbytes, ()),)
        for group, nbytes in groups
    ]
    return Split(shares.load_bytes, tuple(routes))


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
class _Run:
    """Bytes ``start .. stop`` of one row, sent by one host."""

    host: str
    start: int
    stop: int


def _fill_rows(group: HostGroup, nbytes: int, share: Mapping[str, int]) -> list[list[_Run]]:
    """``len(receivers)`` rows of ``nbytes`` bytes; the first holds owners only."""
    rows: list[list[_Run]] = [[] for _ in group.receivers]
    filled = 0
    for host in (*group.owners, *group.receivers):
        left = share.get(host, 0)
        while left > 0:
            row, start = divmod(filled, nbytes)
            length = min(left, nbytes - start)
            rows[row].append(_Run(host, start, start + length))
            filled += length
            left -= length
    return rows


def _hops(group: HostGroup, senders: Sequence[str]) -> tuple[Hop, ...]:
    """A tree over the receivers in which every host sends as often as it is listed; the first listed is an owner."""
    to_do: dict[str, int] = {}
    for host in senders:
        to_do[host] = to_do.get(host, 0) + 1
    relays_first = sorted(group.receivers, key=lambda host: (host not in to_do, host))
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
