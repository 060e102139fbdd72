"""Must ranks that save the same state again plan again? No: once all know that nothing has changed, the plan stands.

Definitions. What a rank tells the others of its state comes in *parts*, JSON values. An *epoch* is the digest of what
all ranks have told, so ranks in the same epoch have seen the same plan.

    gather 1   every rank: the epoch that it remembers for the very parts it has now, and the digests of the parts
               all the same epoch: done, nobody tells anything
    gather 2   the parts themselves; of parts that are equal, the lowest rank that has them tells

An epoch is remembered with the rank and the size of the group, so a plan is never used where it does not fit: there is
no flag to set and nothing to invalidate. What callers compute from the parts they keep under the epoch.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from remesh.comm.gather import Group, gather_from, group_rank, group_size, step_together

T = TypeVar("T")

_MAX_PLANS = 8
"""A program may save several states in turn, such as model and optimizer, and each save agrees more than once."""


@dataclass(slots=True)
class Plan:
    """What has been agreed on once, and what was computed from it."""

    epoch: str
    kept: dict[str, Any] = field(default_factory=dict)
    """Values that callers keep for the next time, by name. They follow from what all ranks told, and nothing else."""


@dataclass(frozen=True, slots=True)
class _Mine:
    """What this rank told, and in which place of which group."""

    place: tuple[int, int]
    parts: Sequence[Any]
    digests: list[str]


@dataclass(frozen=True, slots=True)
class Agreement(Generic[T]):
    """What came of one round of telling."""

    plan: Plan
    told: list[list[Any]] | None
    """The parts of every rank, by rank; equal parts are the same object. None when all is as the plan remembers."""
    beside: list[Any]
    """What each rank told beside its parts, by rank."""
    value: T
    """What this rank's step returned, of which it told the others."""
    mine: _Mine


class PlanCache:
    """The plans of a few states. Every rank of a group has one and makes the same calls on it."""

    def __init__(self, max_plans: int = _MAX_PLANS) -> None:
        self._max_plans = max_plans
        self._remembered: list[tuple[_Mine, Plan]] = []
        """The one used last at the end."""

    def agree(
        self,
        step: Callable[[], T],
        group: Group = None,
        doing: str = "planning",
        *,
        tell: Callable[[T], Any] = lambda value: value,
    ) -> Agreement[T]:
        """Run a local step and hear the others. ``tell`` makes of its value this rank's parts and something beside.

        Called by every rank of the group; blocks until all have called it. An error of the step is raised on all.
        What comes of it is remembered with `remember` only, when all is well with it on all ranks.
        """
        place = (group_rank(group), group_size(group))

        def look() -> tuple[T, Any, _Mine, Plan | None]:
            value = step()
            parts, beside = tell(value)
            mine, plan = self._find(place, parts) or (_Mine(place, parts, _digests_of(parts, place)), None)
            return value, beside, mine, plan

        done = step_together(look, group, doing, tell=lambda seen: [_epoch_of(seen[3]), seen[2].digests, seen[1]])
        value, _, mine, plan = done.mine
        beside = [besides for _, _, besides in done.told]
        if plan is not None and all(epoch == plan.epoch for epoch, _, _ in done.told):
            return Agreement(plan, None, beside, value, mine)
        digests = [of_rank for _, of_rank, _ in done.told]
        everywhere = _tell_in_full(mine.parts, digests, group, doing) if any(digests) else [[] for _ in done.told]
        new = Plan(_digest_of(digests) if place[1] > 1 else uuid.uuid4().hex)
        return Agreement(new, everywhere, beside, value, mine)

    def remember(self, agreement: Agreement[Any]) -> None:
        """Let equal parts find this plan the next time. Called by every rank, or by none."""
        if agreement.told is not None and self._max_plans:
            kept = [one for one in self._remembered if one[0] != agreement.mine]
            self._remembered = [*kept, (agreement.mine, agreement.plan)][-self._max_plans :]

    def _find(self, place: tuple[int, int], parts: Sequence[Any]) -> tuple[_Mine, Plan] | None:
        for at, (mine, _) in enumerate(self._remembered):
            if mine.place == place and mine.parts == parts:
                self._remembered.append(self._remembered.pop(at))
                return self._remembered[-1]
        return None


def _epoch_of(plan: Plan | None) -> str | None:
    return None if plan is None else plan.epoch


def _tell_in_full(parts: Sequence[Any], digests: Sequence[Sequence[str]], group: Group, doing: str) -> list[list[Any]]:
    if len(digests) == 1:
        return [list(parts)]
    rank = group_rank(group)
    first: dict[str, tuple[int, int]] = {}
    for teller, of_rank in enumerate(digests):
        for at, digest in enumerate(of_rank):
            first.setdefault(digest, (teller, at))
    mine = list(zip(digests[rank], parts, strict=True))
    said = gather_from(
        lambda: [part if first[digest] == (rank, at) else None for at, (digest, part) in enumerate(mine)],
        group,
        doing,
    )
    return [[said[first[digest][0]][first[digest][1]] for digest in of_rank] for of_rank in digests]


def _digests_of(parts: Sequence[Any], place: tuple[int, int]) -> list[str]:
    """A rank that is alone has nobody to compare with."""
    return [_digest_of(part) for part in parts] if place[1] > 1 else [""] * len(parts)


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()[:32]
