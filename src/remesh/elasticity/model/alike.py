"""Comparison of the options that must be the same on all ranks.

A rank that saves at other steps than the others waits for them in a collective that they are not in; one that cuts
batches of another size loses and repeats samples. So ranks exchange their options wherever they meet anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remesh.foundation.options import find_unlike

MISSING = "missing"


def describe_unlike(by_place: Sequence[Mapping[str, Any]], who: Callable[[int], str]) -> str | None:
    """In words the first option that not all have alike, and two that differ in it; None where all are alike.

    ``by_place`` has the options of each by name, ``who`` returns the name of the rank or node at a place there.

    >>> describe_unlike([{"seed": 0}, {"seed": 0}, {"seed": 7}], lambda rank: f"rank {rank}")
    'seed is 0 on rank 0 and 7 on rank 2'
    """
    unlike = find_unlike(by_place)
    if unlike is None:
        return None
    name, place = unlike
    first, value = (by_place[at].get(name, MISSING) for at in (0, place))
    return f"{name} is {first} on {who(0)} and {value} on {who(place)}"
