"""Unit tasks of moves and their lower bound, slice by slice: what plans are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from remesh.layout import compute_overlap
from remesh.resharding import Bound, Network, TensorMove
from remesh.resharding.model.bound import HostGroup, bound_of_groups


@dataclass(frozen=True)
class UnitTask:
    """One slice: ranks that hold all of it, ranks that want all of it."""

    givers: tuple[int, ...]
    takers: tuple[int, ...]
    nbytes: int


def compute_tasks(moves: Sequence[TensorMove]) -> list[UnitTask]:
    """A task for each slice of each move."""
    found = []
    for move in moves:
        for part in compute_overlap(move.src, move.dst):
            givers, takers = (
                tuple(sorted({int(shard.holder) for shard in side})) for side in (part.givers, part.takers)
            )
            found.append(UnitTask(givers, takers, part.box.size * move.src.itemsize_bytes))
    return found


def compute_lower_bound(tasks: Iterable[UnitTask], host_of: Mapping[int, str], network: Network | None = None) -> Bound:
    """The bound of the bytes of all host groups."""
    groups: dict[HostGroup, int] = {}
    for task in tasks:
        owners = {host_of[rank] for rank in task.givers}
        receivers = {host_of[rank] for rank in task.takers} - owners
        group = HostGroup(tuple(sorted(owners)), tuple(sorted(receivers)))
        groups[group] = groups.get(group, 0) + task.nbytes
    return bound_of_groups(groups, network)
