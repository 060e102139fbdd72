"""Retention policies of checkpoints, as pure functions of what has been saved.

A policy names checkpoints to keep, each with its reason. Policies add up: what any of them keeps, stays, and the newest
complete checkpoint stays always. Nothing here deletes; `housekeeping` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from remesh.foundation.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the application measured at this step."""


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The highest steps."""

    count: int

    def __post_init__(self) -> None:
        _check_positive("KeepLast", "count", self.count)

    def kept(self, saved: Sequence[Saved]) -> dict[int, str]:
        """Step to reason."""
        newest = sorted((one.step for one in saved), reverse=True)[: self.count]
        return dict.fromkeys(newest, f"one of the last {self.count}")


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """The first checkpoint of each interval of so many steps, so that sparse ones remain of the whole run."""

    num_steps: int

    def __post_init__(self) -> None:
        _check_positive("KeepEvery", "num_steps", self.num_steps)

    def kept(self, saved: Sequence[Saved]) -> dict[int, str]:
        """Step to reason."""
        first: dict[int, int] = {}
        for one in saved:
            interval = one.step // self.num_steps
            first[interval] = min(one.step, first.get(interval, one.step))
        return dict.fromkeys(first.values(), f"first of an interval of {self.num_steps} steps")


@dataclass(frozen=True, slots=True)
class KeepBest:
    """The best by a metric; checkpoints without it, or with NaN, do not count."""

    metric: str
    count: int
    largest: bool = False
    """Whether a larger value is a better one."""

    def __post_init__(self) -> None:
        _check_positive("KeepBest", "count", self.count)

    def kept(self, saved: Sequence[Saved]) -> dict[int, str]:
        """Step to reason. Of equal values the higher step is better."""
        sign = 1 if self.largest else -1
        known = [one for one in saved if not math.isnan(one.metrics.get(self.metric, math.nan))]
        best = sorted(known, key=lambda one: (sign * one.metrics[self.metric], one.step), reverse=True)[: self.count]
        return {one.step: f"{self.metric} {one.metrics[self.metric]:g} is among the best {self.count}" for one in best}


Policy = KeepLast | KeepEvery | KeepBest


def decide_kept(saved: Sequence[Saved], policies: Sequence[Policy]) -> dict[int, str]:
    """The steps that stay, with the reason of each; all of them when there is no policy.

    >>> decide_kept([Saved(step) for step in (10, 20, 30, 40)], [KeepLast(1), KeepEvery(20)])
    {10: 'first of an interval of 20 steps', 20: 'first of an interval of 20 steps', \
40: 'the newest; one of the last 1; first of an interval of 20 steps'}
    """
    if not saved:
        return {}
    if not policies:
        return {one.step: "no policy removes it" for one in sorted(saved, key=lambda one: one.step)}
    reasons: dict[int, list[str]] = {max(one.step for one in saved): ["the newest"]}
    for policy in policies:
        for step, reason in policy.kept(saved).items():
            reasons.setdefault(step, []).append(reason)
    return {step: "; ".join(reasons[step]) for step in sorted(reasons)}


def _check_positive(policy: str, name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"making the retention policy {policy}: {name} is {value}, expected at least 1")
