"""Lower bound that no schedule beats on the given hosts, and the even spread of work that it is found by.

Model. Hosts send and receive at the same time, at the rate of their NICs; between racks everything shares the rack's
uplink; copies inside a host are free. Without a description of the network (`network`) all NICs are
equal, nothing else restrains, and times are given as bytes through one NIC.

Definitions. For a unit task, its *owner hosts* have a giver on them, its *receiver hosts* have a taker and no giver:
a host with both copies inside. Tasks with equal owner and receiver hosts form a *host group*; the rest of the
planning costs as much as there are groups, however many tensors and devices there are.

The bound is the larger of two terms:

- *receiving*: a receiver host must take every byte that is wanted on it once, from whichever host;
- *sending*: a byte that leaves its owner hosts must be sent by one of them at least once. The smallest possible
  largest load is the largest, over sets T of hosts, of the bytes owned only inside T divided by ``|T|``; it is
  computed as a flow (`spread`). Hosts that pass bytes on can spare the owners every further sending.

With unequal rates, bytes are divided by the rate of the host, and ``|T|`` is the sum of the rates of T. Racks with a
limited uplink give the same two terms once more: whatever a rack wants and does not own must enter it once, and leave
the racks that own it.

Both hold for identical, overlapping and disjoint meshes. When the meshes overlap the bound may lie below what can be
reached, because a host that owns some slices and wants others both sends and relays; `split_senders` returns the load
that it reaches, and the plan reports how far that is from the bound.

Source: facts as in Zhuang et al., arXiv 2211.05322, section 3 (host-level model); the sending term is max-flow =
min-cut on the bipartite graph of groups and owner hosts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from remesh.resharding.model.flow import Work, spread
from remesh.resharding.model.network import Network

_MAX_LISTED = 4
_OUTSIDE = "\0"
"""Begins the place of a host that no uplink restrains; no rack's name does."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The lower bound of a transfer, and its reason."""

    bytes: int
    """Bytes that some host must carry in one direction, rounded up; what takes longest if all NICs were equal."""
    reason: str
    """Which hosts or racks force it, in one sentence."""
    seconds: float | None = None
    """Time that no schedule beats on the given network, without latency; None when none was given."""
    exact: Fraction | None = field(default=None, compare=False, repr=False)
    """The same as ``seconds`` before it was rounded, for planning with it."""


@dataclass(frozen=True, slots=True, order=True)
class HostGroup:
    """The hosts that own a piece of data, and the hosts that receive it."""

    owners: tuple[str, ...]
    """Hosts with a giver, ascending. Invariant: at least one."""
    receivers: tuple[str, ...]
    """Hosts with a taker and no giver, ascending; empty when everything stays inside hosts."""


def bound_of_groups(groups: Mapping[HostGroup, int], network: Network | None = None) -> Bound:
    """The bound for host groups and their bytes."""
    plain = _bound_of_lines(groups, None, "host")
    if network is None:
        return Bound(math.ceil(plain.time), plain.reason)
    hosts = _bound_of_lines(groups, network.host_rates(), "host")
    racks = _bound_of_lines(groups_of_racks(groups, network), network.rack_rates(), "rack")
    return _bound_in_time(plain, hosts, racks)


def bound_of_loads(
    owned: Mapping[tuple[str, ...], int],
    taken: Mapping[str, int],
    network: Network | None = None,
    uplinks: Mapping[tuple[str, str], int] | None = None,
) -> Bound:
    """The bound where every byte has one receiver host: what leaves each set of owner hosts, and what each host takes.

    With racks also where every byte has one owner host: ``uplinks`` is what they carry, by (rack, ``"out"`` or
    ``"in"``).
    """
    work = [(hosts, nbytes) for hosts, nbytes in sorted(owned.items()) if nbytes]
    received = {host: nbytes for host, nbytes in sorted(taken.items()) if nbytes}
    plain = _bound_of_work(received, work, None, "host")
    if network is None:
        return Bound(math.ceil(plain.time), plain.reason)
    hosts = _bound_of_work(received, work, network.host_rates(), "host")
    leaving = [((rack,), nbytes) for (rack, way), nbytes in sorted((uplinks or {}).items()) if way == "out"]
    entering = {rack: nbytes for (rack, way), nbytes in (uplinks or {}).items() if way == "in"}
    racks = _bound_of_work(entering, leaving, network.rack_rates(), "rack")
    return _bound_in_time(plain, hosts, racks)


def groups_of_racks(groups: Mapping[HostGroup, int], network: Network) -> dict[HostGroup, int]:
    """What must cross uplinks: owners and receivers are racks, and a rack with an owner receives nothing.

    Hosts without a limited uplink count as racks of their own, which nothing restrains.
    """
    found: dict[HostGroup, int] = {}
    if not network.racks:
        return found
    place_of = {host: network.rack_of(host) or f"{_OUTSIDE}{host}" for host in network.hosts}
    for group, nbytes in groups.items():
        owners = {place_of[host] for host in group.owners}
        receivers = {place_of[host] for host in group.receivers} - owners
        places = HostGroup(tuple(sorted(owners)), tuple(sorted(receivers)))
        found[places] = found.get(places, 0) + nbytes
    return found


@dataclass(frozen=True, slots=True)
class _LineBound:
    """The bound that one kind of line gives: NICs of hosts, or uplinks of racks."""

    time: Fraction
    """In seconds; in bytes when all rates are 1."""
    reason: str


def _bound_in_time(plain: _LineBound, hosts: _LineBound, racks: _LineBound) -> Bound:
    worst = max(hosts, racks, key=lambda bound: bound.time)
    return Bound(math.ceil(plain.time), worst.reason, float(worst.time), worst.time)


def _bound_of_lines(groups: Mapping[HostGroup, int], rates: Mapping[str, Fraction] | None, what: str) -> _LineBound:
    received: dict[str, int] = {}
    work = []
    for group, nbytes in sorted(groups.items(), key=lambda item: (item[0].owners, item[0].receivers)):
        for host in group.receivers:
            received[host] = received.get(host, 0) + nbytes
        # A host without a limit could do all of the sending.
        if group.receivers and (rates is None or all(owner in rates for owner in group.owners)):
            work.append((group.owners, nbytes))
    return _bound_of_work(received, work, rates, what)


def _bound_of_work(
    received: Mapping[str, int],
    work: Sequence[tuple[tuple[str, ...], int]],
    rates: Mapping[str, Fraction] | None,
    what: str,
) -> _LineBound:
    """The bound when lines receive so many bytes, and sets of owners have so many to send."""
    receiving = {
        host: Fraction(nbytes) / (1 if rates is None else rates[host])
        for host, nbytes in received.items()
        if rates is None or host in rates
    }
    if not any(received.values()) and not any(nbytes for _, nbytes in work):
        return _LineBound(Fraction(0), f"nothing has to cross between {what}s")
    taker = min(receiving, key=lambda host: (-receiving[host], host), default=None)
    forced = receiving[taker] if taker is not None else Fraction(0)
    items = _merge_by_owners(work)
    sending = spread(items, at_least=forced, rates=rates)
    if sending.load <= forced:
        if taker is None:
            return _LineBound(Fraction(0), f"nothing has to cross between {what}s that are limited")
        return _LineBound(forced, f"{what} {taker} must receive {received[taker]} bytes that it does not hold")
    owners = ", ".join(sending.busiest[:_MAX_LISTED]) + (", ..." if len(sending.busiest) > _MAX_LISTED else "")
    owned = sum(item.weight for item in items if set(item.owners) <= set(sending.busiest))
    what = what if len(sending.busiest) == 1 else f"{what}s"
    return _LineBound(sending.load, f"{owned} bytes can leave only from {what} {owners}")


def _merge_by_owners(work: Iterable[tuple[tuple[str, ...], int]]) -> list[Work]:
    """One item for each set of owners: for the first sending nothing else matters."""
    total: dict[tuple[str, ...], int] = {}
    for owners, nbytes in work:
        total[owners] = total.get(owners, 0) + nbytes
    return [Work(nbytes, 1, owners) for owners, nbytes in total.items()]
