"""How much goes where? Bytes of flows, between hosts and between ranks."""

from __future__ import annotations

import numpy as np

from remesh.resharding.schedule.flows import Flows


def bytes_between_hosts(flows: Flows) -> dict[tuple[str, str], int]:
    """Bytes by (giver, taker), without what stays inside a host; counted on the hops."""
    width = len(flows.hosts)
    keys, place = np.unique(flows.hop_giver * width + flows.hop_taker, return_inverse=True)
    total = np.zeros(len(keys), dtype=np.int64)
    np.add.at(total, place, flows.hop_bytes)
    pairs = (divmod(key, width) for key in keys.tolist())
    return {(flows.hosts[a], flows.hosts[b]): n for (a, b), n in zip(pairs, total.tolist(), strict=True) if a != b}


def bytes_by_pair(flows: Flows) -> dict[tuple[int, int], int]:
    """Bytes by (giver, taker) among ranks, in ascending order of pairs; goes through all messages."""
    base = max(flows.host_of, default=0) + 1
    total: dict[int, int] = {}
    for block in flows.blocks():
        keys, place = np.unique(block.giver * base + block.taker, return_inverse=True)
        sizes = np.zeros(len(keys), dtype=np.int64)
        np.add.at(sizes, place, flows.chunks.nbytes[block.chunk])
        for key, size in zip(keys.tolist(), sizes.tolist(), strict=True):
            total[key] = total.get(key, 0) + size
    return {divmod(key, base): size for key, size in sorted(total.items())}


def bytes_taken(flows: Flows) -> dict[int, int]:
    """Bytes that each rank takes; every chunk comes to each of its takers once, so nobody goes through messages."""
    of_set = np.zeros(len(flows.rank_sets), dtype=np.int64)
    np.add.at(of_set, flows.takers, flows.chunks.nbytes)
    total: dict[int, int] = {}
    for ranks, nbytes in zip(flows.rank_sets, of_set.tolist(), strict=True):
        if nbytes:
            for rank in ranks:
                total[rank] = total.get(rank, 0) + nbytes
    return total
