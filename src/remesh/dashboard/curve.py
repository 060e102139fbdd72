"""Curve of a number over the steps of a job: averages over stretches of steps, few enough to draw.

A *stretch* is ``width`` steps long. When there are more stretches than the limit the width doubles and neighbours are
joined, so a curve of any length takes bounded memory, and its average over any whole stretch stays exact.
"""

from __future__ import annotations

import math

DEFAULT_LIMIT = 512
"""Stretches that a curve keeps at the most: about one for two pixels of a page."""


class Curve:
    """Averages of a number by step."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self._limit = limit
        self._width = 1
        self._sums: dict[int, tuple[float, int]] = {}
        """By number of stretch: sum and count."""

    def add(self, step: int, value: float) -> None:
        """One value, from any rank; values that are no number, such as a loss that overflowed, leave a gap."""
        if not math.isfinite(value):
            return
        total, count = self._sums.get(step // self._width, (0.0, 0))
        self._sums[step // self._width] = (total + value, count + 1)
        while len(self._sums) > self._limit:
            self._width *= 2
            joined: dict[int, tuple[float, int]] = {}
            for stretch, (total, count) in self._sums.items():
                before = joined.get(stretch // 2, (0.0, 0))
                joined[stretch // 2] = (before[0] + total, before[1] + count)
            self._sums = joined

    def forget_after(self, step: int) -> None:
        """The job went back to ``step``: what came later will come again."""
        self._sums = {stretch: sums for stretch, sums in self._sums.items() if stretch * self._width <= step}

    def points(self) -> list[list[float]]:
        """``[step, average]`` in order, each at the first step of its stretch.

        >>> curve = Curve(limit=2)
        >>> for step in range(4):
        ...     curve.add(step, 10.0 * step)
        >>> curve.points()
        [[0, 5.0], [2, 25.0]]
        """
        return [[stretch * self._width, total / count] for stretch, (total, count) in sorted(self._sums.items())]
