"""Detection of ranks that are slow for long enough to be excluded (persistent stragglers).

Each comparison has every rank's *pace*: its busy time per step, and the step that it had reached. A rank is *slow* in
one if it worked longer than a factor times the median of all others. One that was slow in every comparison over a
number of steps is reported, the slowest first, one in a generation. Whether it is left out is decided elsewhere
(:mod:`remesh.elasticity.membership.exclusion`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from remesh.elasticity.membership.exclusion import StragglerRules

MIN_RANKS = 3
"""With two ranks there is no median to call one of them slow."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How one rank does."""

    busy_s: float
    """Busy time per step, of late."""
    step: int
    """Batches behind it."""


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that was slow for long enough to be reported."""

    rank: int
    ratio: float
    """Its busy time over the median of the others'."""
    reason: str


@dataclass
class PaceJudge:
    """Compares paces in one generation after another."""

    rules: StragglerRules
    _since_step: dict[int, int] = field(default_factory=dict)
    """Rank -> step at which it was first found slow, without a break since."""
    _has_reported: bool = False

    @property
    def is_on(self) -> bool:
        """Whether slow ranks are looked for at all."""
        return self.rules.factor > 0

    def begin(self) -> None:
        """A new generation runs, and ranks may be others."""
        self._since_step.clear()
        self._has_reported = False

    def compare(self, paces: Mapping[int, Pace]) -> SlowRank | None:
        """The slow rank to report now, if there is one."""
        if not self.is_on or len(paces) < MIN_RANKS:
            return None
        found = {}
        ordered = sorted(paces, key=lambda rank: (paces[rank].busy_s, rank))
        busy_s = [paces[rank].busy_s for rank in ordered]
        for at, rank in enumerate(ordered):
            median_s = median_without(busy_s, at)
            if median_s > 0 and busy_s[at] >= self.rules.factor * median_s:
                since = self._since_step.get(rank, paces[rank].step)
                found[rank] = (since, busy_s[at] / median_s, median_s)
        self._since_step = {rank: since for rank, (since, _, _) in found.items()}
        late = [rank for rank, (since, _, _) in found.items() if paces[rank].step - since >= self.rules.num_steps]
        if not late or self._has_reported:
            return None
        self._has_reported = True
        slowest = max(late, key=lambda rank: (found[rank][1], -rank))
        since, ratio, median_s = found[slowest]
        reason = (
            f"rank {slowest} works {paces[slowest].busy_s:.3g} s per step, {len(paces) - 1} others {median_s:.3g} s "
            f"(median), and so it was for {paces[slowest].step - since} steps; allowed are {self.rules.factor:g} x for "
            f"fewer than {self.rules.num_steps} steps"
        )
        return SlowRank(slowest, ratio, reason)


def median_without(ordered: Sequence[float], at: int) -> float:
    """The median of what is left when the element ``at`` is taken out of an ordered sequence.

    >>> median_without([1.0, 2.0, 4.0, 9.0], 3), median_without([1.0, 2.0, 4.0], 0)
    (2.0, 3.0)
    """
    count = len(ordered) - 1
    low, high = (count - 1) // 2, count // 2
    return (ordered[low + (low >= at)] + ordered[high + (high >= at)]) / 2
