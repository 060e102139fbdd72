"""In which order can everything be sent without anyone waiting? Preemptive open shop, by Birkhoff and von Neumann.

Definitions. Entry ``(a, b)`` of a traffic matrix is what line ``a`` must send to line ``b``. In a *stage* every line
sends to at most one other and takes from at most one, all for the same time. ``D`` is the largest sum of a row or a
column: nothing can be done before ``D``.

Algorithm: stages that together last exactly ``D`` (Gonzalez and Sahni 1976):

1. Fill the matrix up until every row and every column adds up to ``D``: idle time on the diagonals, and the transposed
   matrix in the fourth quarter.

        M              diag(D - row sums)
        diag(D - column sums)         M^T

2. A matrix with equal sums has a perfect matching on its entries that are not 0 (Birkhoff). Let it run for as long as
   its smallest entry lasts, subtract, and repair the matching where an entry is used up (augmenting paths).

Every stage uses up an entry, so there are at most twice as many as there are entries and lines. All numbers are
integers, so sums stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrafficStage:
    """What is sent during one stretch of time."""

    start: int
    """Sum of the lengths of all earlier stages."""
    length: int
    """Invariant: > 0."""
    pairs: tuple[tuple[int, int], ...]
    """Who sends to whom. Invariant: no line twice on the same side."""


def decompose(traffic: Mapping[tuple[int, int], int]) -> list[TrafficStage]:
    """Stages that carry exactly this traffic (amounts > 0, by sender and taker) in the least time.

    >>> [(stage.length, stage.pairs) for stage in decompose({(0, 2): 2, (0, 3): 1, (1, 2): 1})]
    [(2, ((0, 2),)), (1, ((0, 3), (1, 2)))]
    """
    senders = sorted({giver for giver, _ in traffic})
    takers = sorted({taker for _, taker in traffic})
    entries = _fill_up(traffic, {a: n for n, a in enumerate(senders)}, {b: n for n, b in enumerate(takers)})
    left = sum(entries[0].values()) if entries else 0
    row_of = [-1] * len(entries)
    column_of = [-1] * len(entries)
    stages: list[TrafficStage] = []
    now = 0
    while left:
        for row in range(len(entries)):
            if column_of[row] < 0:
                _augment(row, entries, row_of, column_of)
        length = min(entries[row][column] for row, column in enumerate(column_of))
        real = [(row, column_of[row]) for row in range(len(senders)) if column_of[row] < len(takers)]
        if real:
            stages.append(TrafficStage(now, length, tuple((senders[row], takers[column]) for row, column in real)))
        now += length
        left -= length
        for row, column in enumerate(column_of):
            entries[row][column] -= length
            if not entries[row][column]:
                del entries[row][column]
                row_of[column] = column_of[row] = -1
    return stages


def _fill_up(
    traffic: Mapping[tuple[int, int], int], row_at: Mapping[int, int], column_at: Mapping[int, int]
) -> list[dict[int, int]]:
    """Rows of the filled matrix, as columns and what is in them; every row and column adds up to the same."""
    num_rows, num_columns = len(row_at), len(column_at)
    entries: list[dict[int, int]] = [{} for _ in range(num_rows + num_columns)]
    row_sums, column_sums = [0] * num_rows, [0] * num_columns
    for (giver, taker), amount in sorted(traffic.items()):
        row, column = row_at[giver], column_at[taker]
        entries[row][column] = amount
        entries[num_rows + column][num_columns + row] = amount
        row_sums[row] += amount
        column_sums[column] += amount
    total = max([*row_sums, *column_sums], default=0)
    for row, amount in enumerate(row_sums):
        if amount < total:
            entries[row][num_columns + row] = total - amount
    for column, amount in enumerate(column_sums):
        if amount < total:
            entries[num_rows + column][column] = total - amount
    return entries


def _augment(start: int, entries: list[dict[int, int]], row_of: list[int], column_of: list[int]) -> None:
    """Match one more row, by a shortest path of changes."""
    came_from: dict[int, int] = {}
    rows = [start]
    for row in rows:
        for column in entries[row]:
            if column in came_from:
                continue
            came_from[column] = row
            if row_of[column] < 0:
                _flip(column, came_from, row_of, column_of)
                return
            rows.append(row_of[column])
    raise AssertionError("equal sums always leave a perfect matching")


def _flip(column: int, came_from: Mapping[int, int], row_of: list[int], column_of: list[int]) -> None:
    while column >= 0:
        row = came_from[column]
        before = column_of[row]
        row_of[column], column_of[row] = row, column
        column = before
