"""How fast can it be at best? The lower bound that no schedule beats on the given hosts.

Model. Every host has one NIC that sends and receives at the same time, at the same rate as every other; the network
between them never blocks; copies inside a host are free. Times are given as bytes through one NIC.

Definitions. For a unit task, its *owner hosts* have a giver on them, its *receiver hosts* have a taker and no giver:
a host with both copies inside. Tasks with equal owner and receiver hosts form a *host group*; the rest of the
planning costs as much as there are groups, however many tensors and devices there are.

The bound is the larger of two terms:

- *receiving*: a receiver host must take every byte that is wanted on it once, whoever sends it;
- *sending*: a byte that leaves its owner hosts must be sent by one of them at least once. The smallest possible
  largest load is the largest, over sets T of hosts, of the bytes owned only inside T divided by ``|T|``; it is
  computed as a flow (`remesh.reshard.flow`). Hosts that pass bytes on can spare the owners every further sending.

Both hold for identical, overlapping and disjoint meshes. When the meshes overlap the bound may lie below what can
be reached, because a host that owns some slices and wants others both sends and relays; `split_senders` returns
the load that it reaches, and the plan says how far that is from the bound.

Source: facts as in Zhuang et al., arXiv 2211.05322, section 3 (host-level model); the sending term is max-flow =
min-cut on the bipartite graph of groups and owner hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from remesh.errors import PlanError
from remesh.reshard.flow import Work, spread
from remesh.reshard.tasks import UnitTask

_MAX_LISTED = 4


@dataclass(frozen=True, slots=True)
class Bound:
    """What no schedule can beat, and why."""

    bytes: int
    """Bytes that some NIC must carry in one direction, rounded up."""
    reason: str
    """Which hosts force it, in one sentence."""


@dataclass(frozen=True, slots=True, order=True)
class HostGroup:
    """Who owns and who receives, among hosts."""

    owners: tuple[str, ...]
    """Hosts with a giver, ascending. Invariant: at least one."""
    receivers: tuple[str, ...]
    """Hosts with a taker and no giver, ascending; empty when everything stays inside hosts."""


def host_group_of(task: UnitTask, host_of: Mapping[int, str]) -> HostGroup:
    """The host group of a unit task; raises `PlanError` for a rank without a host."""
    return host_group(task.givers, task.takers, host_of)


def host_group(givers: Iterable[int], takers: Iterable[int], host_of: Mapping[int, str]) -> HostGroup:
    """The host group of anything that these ranks give and these ranks want."""
    try:
        owners = {host_of[rank] for rank in givers}
        return HostGroup(tuple(sorted(owners)), tuple(sorted({host_of[rank] for rank in takers} - owners)))
    except KeyError as missing:
        raise PlanError(
            f"finding the hosts of a move: rank {missing} takes part but host_of names only {len(host_of)} ranks; give "
            "a host for every rank of the group"
        ) from missing


def compute_lower_bound(tasks: Iterable[UnitTask], host_of: Mapping[int, str]) -> Bound:
    """The bound for these tasks, in bytes through one NIC.

    ``host_of`` maps ranks to host names; ranks with equal names share a NIC.
    """
    groups: dict[HostGroup, int] = {}
    by_ranks: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for task in tasks:
        key = (task.givers, task.takers)
        by_ranks[key] = by_ranks.get(key, 0) + task.nbytes
    for (givers, takers), nbytes in by_ranks.items():
        group = host_group(givers, takers, host_of)
        groups[group] = groups.get(group, 0) + nbytes
    return bound_of_groups(groups)


def bound_of_groups(groups: Mapping[HostGroup, int]) -> Bound:
    """The bound for host groups and their bytes."""
    received: dict[str, int] = {}
    work = []
    for group, nbytes in sorted(groups.items()):
        for host in group.receivers:
            received[host] = received.get(host, 0) + nbytes
        if group.receivers:
            work.append(Work(nbytes, 1, group.owners))
    if not any(received.values()):
        return Bound(0, "nothing has to cross between hosts")
    taker = min(received, key=lambda host: (-received[host], host))
    sending = spread(work, at_least=received[taker])
    if sending.load_bytes <= received[taker]:
        return Bound(received[taker], f"host {taker} must receive {received[taker]} bytes that it does not hold")
    owners = ", ".join(sending.busiest[:_MAX_LISTED]) + (", ..." if len(sending.busiest) > _MAX_LISTED else "")
    owned = sum(item.weight for item in work if set(item.owners) <= set(sending.busiest))
    return Bound(
        sending.load_bytes,
        f"{owned} bytes can leave only from {len(sending.busiest)} host(s): {owners}",
    )
