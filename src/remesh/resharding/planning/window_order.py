"""Order of tensors in windows, so that old and new ones hardly ever exist side by side.

Definitions. A *window* is a set of tensors that move together: their new shards are made, all ranks take them, and
their old shards are given up. Before its first window a rank holds its old shards, after its last one its new shards;
it can do with no less than the larger of these two, its *floor*. What it holds beyond that is its *excess*.

Algorithm. Tensors are put in an order one by one: next comes the tensor that leaves the smallest largest excess while
both of its sides exist, then the one that leaves the smallest after it has moved. So a rank that gives up layers and
takes others does both in turns. The order is cut into windows as long as no rank makes more in one than it may; a
tensor that is larger than this by itself has a window of its own. Ranks that hold and want the same of every tensor
are looked at once, and so are tensors that ask the same of every rank.

This is the problem of vectors whose partial sums shall stay small (Steinitz); the greedy rule has no proof here, its
distance to the best order is measured in tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remesh.foundation.errors import PlanError

_Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Windows of tensors, and what ranks hold meanwhile."""

    windows: tuple[tuple[str, ...], ...]
    """Names of the tensors of each window, in the order in which they move."""
    peak_bytes: tuple[int, ...]
    """Most bytes of old and new shards that each rank holds at one time."""
    floor_bytes: tuple[int, ...]
    """The larger of what each rank holds before and after. Invariant: at most the peak."""


def plan_windows(sizes: Mapping[str, tuple[Sequence[int], Sequence[int]]], window_bytes: int) -> WindowPlan:
    """Windows in which no rank makes more than so many bytes, but for a larger tensor alone.

    ``sizes`` has for each tensor the bytes that every rank gives up, and those that it makes. Raises `PlanError` for a
    window that is not positive.
    """
    if window_bytes <= 0:
        raise PlanError(f"planning windows: found a window of {window_bytes} bytes, expected more than 0")
    names = sorted(sizes)
    if not names:
        return WindowPlan((), (), ())
    old = np.array([sizes[name][0] for name in names], np.int64)
    new = np.array([sizes[name][1] for name in names], np.int64)
    order = _order(old, new)
    windows = _cut(order, new, window_bytes)
    floor = np.maximum(old.sum(0), new.sum(0))
    return WindowPlan(
        tuple(tuple(names[number] for number in window) for window in windows),
        tuple(_peak(windows, old, new).tolist()),
        tuple(floor.tolist()),
    )


def _order(old: _Bytes, new: _Bytes) -> list[int]:
    """Numbers of the tensors, in the order in which they move. Shapes of both: (tensors, ranks)."""
    alike = np.unique(np.concatenate([old, new]), axis=1)
    old, new = alike[: len(old)], alike[len(old) :]
    kinds, kind_of = np.unique(np.concatenate([old, new], 1), axis=0, return_inverse=True)
    old, new = np.split(kinds, 2, 1)
    waiting = [np.flatnonzero(kind_of == kind).tolist()[::-1] for kind in range(len(kinds))]
    # Counted from the floor, so that ranks that hold little do not pass for ranks with room.
    counts = np.array([len(numbers) for numbers in waiting])[:, None]
    held = (old * counts).sum(0)
    held = held - np.maximum(held, (new * counts).sum(0))
    order = []
    while any(waiting):
        left = np.array([kind for kind, numbers in enumerate(waiting) if numbers])
        beside = (held + new[left]).max(1)
        after = (held + new[left] - old[left]).max(1)
        kind = int(left[np.lexsort((after, beside))[0]])
        order.append(waiting[kind].pop())
        held = held + new[kind] - old[kind]
    return order


def _cut(order: Sequence[int], new: _Bytes, window_bytes: int) -> list[list[int]]:
    windows: list[list[int]] = []
    made = np.zeros(new.shape[1], np.int64)
    for number in order:
        made = made + new[number]
        if not windows or made.max() > window_bytes:
            windows.append([])
            made = new[number]
        windows[-1].append(number)
    return windows


def _peak(windows: Sequence[Sequence[int]], old: _Bytes, new: _Bytes) -> _Bytes:
    held: _Bytes = old.sum(0)
    peak: _Bytes = held
    for window in windows:
        held = held + new[window].sum(0)
        peak = np.maximum(peak, held)
        held = held - old[window].sum(0)
    return peak
