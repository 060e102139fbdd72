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
from typing import Any

from remesh.comm.gather import Group, gather_from, group_rank, group_size

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
class Agreement:
    """What came of one round of telling."""

    plan: Plan
    told: list[list[Any]] | None
    """The parts of every rank, by rank; equal parts are the same object. None when all is as the plan remembers."""
    beside: list[Any]
    """What each rank told beside its parts, by rank."""
    mine: _Mine


class PlanCache:
    """The plans of a few states. Every rank of a group has one and makes the same calls on it."""

    def __init__(self, max_plans: int = _MAX_PLANS) -> None:
        self._max_plans = max_plans
        self._remembered: list[tuple[_Mine, Plan]] = []
        """The one used last at the end."""

    def agree(
        self, produce: Callable[[], tuple[Sequence[Any], Any]], group: Group = None, doing: str = "planning"
    ) -> Agreement:
        """Run ``produce``, which returns this rank's parts and something small to tell beside, and hear the others.

        Called by every rank of the group; blocks until all have called it. An error of ``produce`` is raised on all.
        What comes of it is remembered with `remember` only, when all is well with it on all ranks.
        """
        place = (group_rank(group), group_size(group))
        said: list[tuple[_Mine, Plan | None]] = []

        def tell_briefly() -> list[Any]:
            parts, beside = produce()
            said.append(self._find(place, parts) or (_Mine(place, parts, _digests_of(parts, place)), None))
            mine, plan = said[0]
            return [plan.epoch if plan else None, mine.digests, beside]

        told = gather_from(tell_briefly, group, doing)
        beside = [besides for _, _, besides in told]
        mine, plan = said[0]
        if plan is not None and all(epoch == plan.epoch for epoch, _, _ in told):
            return Agreement(plan, None, beside, mine)
        digests = [of_rank for _, of_rank, _ in told]
        everywhere = _tell_in_full(mine.parts, digests, group, doing) if any(digests) else [[] for _ in told]
        return Agreement(Plan(_digest_of(digests) if place[1] > 1 else uuid.uuid4().hex), everywhere, beside, mine)

    def remember(self, agreement: Agreement) -> None:
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
