"""Verdicts on hangs and stragglers from what ranks report, each with its reason.

*Hang.* No rank has made a step for too long. Every rank reports the stack of its main thread. A rank *waits* if it is
inside a collective, else it *works*; a rank that does not answer at all is stuck outside Python. If some wait, those
that do not, or that wait in an earlier step, are the culprits: they did not enter what the others wait in. If all wait
in one place, it is the network; if none waits, the step is just long, and no rank is blamed.

*Stragglers.* Wall times of ranks are equal where they meet in every step; what differs is how long each works before
the others' waiting ends. So each rank's *busy* time per step counts: wall time less the share that its main thread was
seen inside collectives. A rank's score is how many robust deviations (median absolute deviation, as 1.4826 MAD, at
least 5 % of the median) its busy time lies above the median of all. Source: Iglewicz and Hoaglin, How to Detect and
Handle Outliers, 1993, for the score and its bound of 3.5.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MAX_SCORE = 3.5
MAD_TO_DEVIATION = 1.4826
MIN_DEVIATION = 0.05
"""Least deviation, as a share of the median: equal ranks differ by less all the time."""
MIN_RATIO = 1.2
"""A rank that is less than this slower than the median is not reported."""


@dataclass(frozen=True, slots=True)
class RankStack:
    """The step of one rank, and the stack of its main thread."""

    rank: int
    node: int
    slot: int
    step: int
    """Batches behind it; -1 when it did not answer."""
    collective: str
    """Name of the collective that its main thread is in; empty when it is in none."""
    place: str
    """Innermost line of user code, as ``train.py:55 in train``."""
    text: str
    """The whole stack, outermost first; empty when it did not answer."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankStack:
        return cls(**value)

    @property
    def answered(self) -> bool:
        return self.step >= 0


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """The ranks that keep the other ranks waiting."""

    culprits: tuple[RankStack, ...]
    """Empty when no rank is to blame."""
    reason: str


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that works longer than the others."""

    rank: int
    score: float
    """Robust deviations above the median. Invariant: > MAX_SCORE."""
    ratio: float
    """Its busy time over the median of all. Invariant: >= MIN_RATIO."""
    reason: str


def decide_culprits(stacks: Sequence[RankStack]) -> HangVerdict:
    """Decide which ranks did not enter the collective in which the others wait."""
    waiting = [one for one in stacks if one.answered and one.collective]
    if not waiting:
        silent = [one for one in stacks if not one.answered]
        if silent and len(silent) < len(stacks):
            return HangVerdict(tuple(silent), f"{_ranks(silent)} does not answer, and none waits in a collective yet")
        return HangVerdict((), f"none of {len(stacks)} ranks waits in a collective: the step is long, not stuck")
    furthest = max(one.step for one in waiting)
    ahead = [one for one in waiting if one.step == furthest]
    culprits = [one for one in stacks if one not in ahead]
    where = f"{ahead[0].collective} after step {furthest}"
    if not culprits:
        return HangVerdict((), f"all {len(stacks)} ranks wait in {where}: the network does not carry")
    described = "; ".join(_describe(one) for one in culprits)
    return HangVerdict(tuple(culprits), f"{_ranks(ahead)} waits in {where}, which did not enter: {described}")


def format_report(verdict: HangVerdict, stacks: Sequence[RankStack]) -> str:
    """One text with the verdict and every rank's stack, culprits first."""
    blamed = {one.rank for one in verdict.culprits}
    parts = [verdict.reason]
    for one in sorted(stacks, key=lambda one: (one.rank not in blamed, one.rank)):
        mark = " (culprit)" if one.rank in blamed else ""
        parts.append(f"--- rank {one.rank}{mark}: {_describe(one)}\n{one.text.rstrip()}".rstrip())
    return "\n".join(parts) + "\n"


def find_stragglers(busy_s: Mapping[int, float]) -> list[Straggler]:
    """Ranks whose busy time per step stands out, the slowest first. Fewer than three ranks have no outlier.

    >>> [one.rank for one in find_stragglers({0: 1.0, 1: 1.02, 2: 0.98, 3: 2.0})]
    [3]
    """
    if len(busy_s) < 3:
        return []
    median = statistics.median(busy_s.values())
    if median <= 0:
        return []
    mad = statistics.median(abs(value - median) for value in busy_s.values())
    deviation = max(MAD_TO_DEVIATION * mad, MIN_DEVIATION * median)
    found = []
    for rank, value in busy_s.items():
        score, ratio = (value - median) / deviation, value / median
        if score > MAX_SCORE and ratio >= MIN_RATIO:
            reason = f"rank {rank} works {value:.3g} s per step, the median of {len(busy_s)} ranks is {median:.3g} s"
            found.append(Straggler(rank, score, ratio, reason))
    return sorted(found, key=lambda one: (-one.score, one.rank))


def _describe(one: RankStack) -> str:
    if not one.answered:
        return f"rank {one.rank} does not answer (its main thread holds the GIL, or the process is stopped)"
    what = f"waits in {one.collective}" if one.collective else f"is at {one.place}"
    return f"rank {one.rank} {what} after step {one.step}"


def _ranks(stacks: Sequence[RankStack]) -> str:
    numbers = sorted(one.rank for one in stacks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"each of ranks {', '.join(map(str, numbers))}"
