"""What must every rank be told alike? Options by which each decides for itself what the others take for granted.

A rank that saves at other steps than the others waits for them in a collective that they are not in; one that cuts
batches of another size loses and repeats samples. So ranks tell each other their options wherever they meet anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

MISSING = "missing"


def describe_unlike(told: Sequence[Mapping[str, Any]], who: Callable[[int], str]) -> str | None:
    """In words the first option that not all have alike, and two that differ in it; None where all are alike.

    ``told`` has the options of each by name, ``who`` names one by its place there.

    >>> describe_unlike([{"seed": 0}, {"seed": 0}, {"seed": 7}], lambda rank: f"rank {rank}")
    'seed is 0 on rank 0 and 7 on rank 2'
    """
    for name in dict.fromkeys(name for options in told for name in options):
        first = told[0].get(name, MISSING)
        for index, options in enumerate(told):
            if (value := options.get(name, MISSING)) != first:
                return f"{name} is {first} on {who(0)} and {value} on {who(index)}"
    return None
