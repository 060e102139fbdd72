"""Snapshots that a node keeps: which of its ranks reads each, and which can be removed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

Key = tuple[int, int]
"""Key of a shelf of snapshots: the generation, and the rank whose state it has."""


def choose_readers(kept: Collection[Key], ranks: Sequence[int]) -> dict[int, list[Key]]:
    """Choose the snapshots that each rank of a node reads: its own, and a fair share of the others kept there.

    >>> choose_readers([(1, 0), (1, 1), (1, 4)], [4, 5])
    {4: [(1, 1), (1, 4)], 5: [(1, 0)]}
    """
    chosen: dict[int, list[Key]] = {rank: [key for key in sorted(kept) if key[1] == rank] for rank in ranks}
    for key in sorted(kept):
        if key[1] not in chosen:
            chosen[min(ranks, key=lambda rank: (len(chosen[rank]), rank))].append(key)
    return {rank: sorted(keys) for rank, keys in chosen.items()}


def decide_retired(kept: Mapping[Key, int]) -> list[Key]:
    """The shelves that an agent may clear: of generations before one that has two versions on some shelf here.

    ``kept`` maps shelves to how many versions each was given so far.
    """
    settled = max((key[0] for key, count in kept.items() if count >= 2), default=0)
    return sorted(key for key in kept if key[0] < settled)
