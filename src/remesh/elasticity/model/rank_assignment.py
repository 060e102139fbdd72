"""Assignment of workers to ranks of a mesh, and of nodes that keep the second copy of snapshots.

A *spare* is a standby worker: it has no rank in the mesh. Snapshots of a rank are kept twice
(:mod:`remesh.elasticity.snapshots.choice`): on its own node, and on its *keeper*, another one.

*Keepers.* A rank is kept by a node with spares, as long as that node keeps fewer than ``RANKS_PER_SPARE`` ranks for
each of its spares; the others by the next node in a ring over the nodes with ranks. So the spares' memory, which is
idle, comes first; a node keeps no more for a spare than for a worker with a rank: two versions of two ranks.

*Ranks.* Where the shape of the mesh is the same, every worker keeps its rank. A free rank goes to a spare that is near
to the rank's snapshots: on its own node, else on its keeper; else to the next spare in order. If the job has to go back
to a snapshot, that spare finds in its own node's memory what it needs, and nothing crosses the network.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

RANKS_PER_SPARE = 2


@dataclass(frozen=True, slots=True)
class MeshMember:
    """A worker with a place in the mesh."""

    rank: int
    """World rank in this generation; row-major position in the mesh. -1 for a worker on standby."""
    node: int
    """Index of its node."""
    slot: int
    pid: int


def compute_keepers(members: Sequence[MeshMember], standby: Sequence[MeshMember]) -> dict[int, int | None]:
    """Rank -> index of the node that keeps the second copy of its snapshots; None where there is no other node.

    >>> members = [MeshMember(rank, rank, 0, 0) for rank in range(3)]
    >>> compute_keepers(members, []), compute_keepers(members, [MeshMember(-1, 7, 0, 0)])
    ({0: 1, 1: 2, 2: 0}, {0: 7, 1: 7, 2: 0})
    """
    room = Counter(spare.node for spare in standby for _ in range(RANKS_PER_SPARE))
    roomiest = [(-count, node) for node, count in room.items()]
    heapq.heapify(roomiest)
    ring = sorted({member.node for member in members})
    follower = dict(zip(ring, [*ring[1:], *ring[:1]], strict=True))
    keepers: dict[int, int | None] = {}
    for member in members:
        own = heapq.heappop(roomiest) if roomiest and roomiest[0][1] == member.node else None
        if roomiest:
            count, keeper = heapq.heappop(roomiest)
            keepers[member.rank] = keeper
            if count + 1 < 0:
                heapq.heappush(roomiest, (count + 1, keeper))
        else:
            after = follower[member.node]
            keepers[member.rank] = None if after == member.node else after
        if own is not None:
            heapq.heappush(roomiest, own)
    return keepers


Candidate = TypeVar("Candidate")


def choose_for_ranks(
    free: Sequence[int], candidates: Sequence[tuple[int, Candidate]], near: Mapping[int, Sequence[int | None]]
) -> tuple[dict[int, tuple[int, Candidate]], list[tuple[int, Candidate]]]:
    """Choose a worker for each free rank; also returns the workers that are left, in order.

    ``candidates`` are (node, who), at least as many as are free; ``near`` names for each rank the nodes where its state
    is kept, the best first.
    """
    waiting = dict(enumerate(candidates))
    by_node: dict[int, list[int]] = {}
    for at in reversed(range(len(candidates))):
        by_node.setdefault(candidates[at][0], []).append(at)
    taken: dict[int, tuple[int, Candidate]] = {}
    for rank in free:
        if at_hand := next((by_node[node] for node in near[rank] if node is not None and by_node.get(node)), None):
            taken[rank] = waiting.pop(at_hand.pop())
    for rank in free:
        if rank not in taken:
            taken[rank] = waiting.pop(next(iter(waiting)))
    return taken, list(waiting.values())
