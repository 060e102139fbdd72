"""JSON form of a group's members, as runs: most groups are a stretch of ranks, or every n-th.

Each member of a group sends all of them in each wave: written out, those of a group of N ranks were N * N numbers.
Equal groups are decoded to the same tuple, so comparing two waves costs nothing either.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final

MAX_MEMBERS: Final = 1 << 24
"""Limit of members of one group; a run that claims more is damaged."""
_MOST_GROUPS: Final = 1 << 16
"""Limit of groups of which the tuples are kept in mind."""
_LEAST_RUN: Final = 4
"""Length from which ranks are written as a run, which is three numbers."""


def pack_members(members: Sequence[int]) -> list[int | list[int]]:
    """Sorted world ranks as JSON: a rank, or ``[start, stop, step]`` of those in between.

    >>> pack_members([0, 1, 2, 3, 4, 9, 12, 16, 20, 24])
    [[0, 5, 1], 9, [12, 25, 4]]
    """
    packed: list[int | list[int]] = []
    start = 0
    while start < len(members):
        end, step = start + 1, members[min(start + 1, len(members) - 1)] - members[start]
        while end < len(members) and members[end] - members[end - 1] == step:
            end += 1
        if end - start < _LEAST_RUN:
            packed.append(members[start])
            start += 1
        else:
            packed.append([members[start], members[end - 1] + 1, step])
            start = end
    return packed


def unpack_members(packed: Sequence[Any]) -> tuple[int, ...]:
    """Unpack the ranks; the same tuple for the same group. `ValueError` or `TypeError` for what is none."""
    return _members_of(tuple(tuple(map(int, part)) if isinstance(part, list) else int(part) for part in packed))


@lru_cache(_MOST_GROUPS)
def _members_of(parts: tuple[int | tuple[int, ...], ...]) -> tuple[int, ...]:
    runs = [range(part, part + 1) if isinstance(part, int) else _run(*part) for part in parts]
    if (count := sum(map(len, runs))) > MAX_MEMBERS:
        raise ValueError(f"a group of {count} members, expected at most {MAX_MEMBERS}")
    return tuple(chain.from_iterable(runs))


def _run(start: int, stop: int, step: int) -> range:
    return range(start, stop, step)
