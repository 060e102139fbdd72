"""Cache of agreed results: a repeated exchange between ranks compares one digest.

Definitions. What a rank sends the others comes in *parts*, JSON values. An *epoch* is the digest of what all ranks have
sent, so ranks in the same epoch have seen the same. What callers compute from the parts (a plan, say) they keep under
the epoch.

    gather 1   every rank: the epochs that it remembers for the very parts it has now, the digests of the parts, and
               something small beside
               one epoch on all ranks: done, no parts are sent
    gather 2   the parts themselves; of parts that are equal, the lowest rank that has them sends them

Where ranks have hardly a part in common, nothing is saved by digests; for such callers every rank sends its parts in
gather 1 as long as nothing is remembered.

An epoch is remembered with the rank and the size of the group, so what is kept is never used where it does not fit:
there is no flag to set and nothing to invalidate.

Options that all ranks must give alike are compared by `check_alike`, which names the one that differs and both values.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from remesh.comm.gather import Group, gather_from, group_rank, group_size, step_together
from remesh.foundation.options import OptionError, find_unlike

T = TypeVar("T")
_MAX_KEPT = 8
"""A program may save several states in turn, such as model and optimizer, and each save agrees more than once."""
_MOST_SHOWN = 200
"""Characters of an option's value in an error."""


@dataclass(slots=True)
class Agreed:
    """A value that ranks agreed on once, and the result computed from it."""

    epoch: str
    kept: dict[str, Any] = field(default_factory=dict)
    """Values that callers keep for the next time, by name. They follow from what all ranks sent alone."""


@dataclass(frozen=True, slots=True)
class _Mine:
    """The value that this rank sent, its subject, and the rank and group that sent it."""

    about: str
    place: tuple[int, int]
    parts: Sequence[Any]
    digests: list[str]


@dataclass(frozen=True, slots=True)
class Agreement(Generic[T]):
    """The result of one exchange of values."""

    agreed: Agreed
    told: list[list[Any]] | None
    """The parts of every rank, by rank; equal parts may be one object. None when all is as remembered."""
    beside: list[Any]
    """What each rank sent beside its parts, by rank."""
    value: T
    """What this rank's step returned; the parts that it sent were made of it."""
    mine: _Mine


class Agreements:
    """The cache of what a group has agreed on, for a few states. Every rank has one and makes the same calls on it."""

    def __init__(self, max_kept: int = _MAX_KEPT, *, tells_first_at_once: bool = False) -> None:
        self._max_kept = max_kept
        self._tells_first_at_once = tells_first_at_once
        self._remembered: list[tuple[_Mine, Agreed]] = []
        """The one used last at the end."""

    def agree(
        self,
        step: Callable[[], T],
        group: Group = None,
        doing: str = "agreeing",
        *,
        tell: Callable[[T], Any] = lambda value: value,
        translate: Callable[[str, BaseException], BaseException] | None = None,
        about: str = "",
    ) -> Agreement[T]:
        """Run a local step and gather the parts of all ranks; ``tell`` makes this rank's parts of its value.

        ``about`` names the kind of the parts, where one memory serves several: equal parts of two kinds, such as none
        at all, are two agreements.

        Called by every rank of the group; blocks until all have called it. An error of the step is raised on all.
        What comes of it is remembered with `remember` only, when all is well with it on all ranks.
        """
        place = (group_rank(group), group_size(group))
        tells_at_once = self._tells_first_at_once and not self._remembered and place[1] > 1

        def look() -> tuple[T, _Mine, Any]:
            value = step()
            parts, beside = tell(value)
            mine = self._find(about, place, parts) or _Mine(about, place, parts, _digests_of(parts, place))
            return value, mine, beside

        def say(made: tuple[T, _Mine, Any]) -> list[Any]:
            _, mine, beside = made
            epochs = [agreed.epoch for sent, agreed in self._remembered if sent is mine]
            return [epochs, mine.digests, beside, mine.parts if tells_at_once else None]

        together = step_together(look, group, doing, tell=say, translate=translate)
        (value, mine, _), sent = together.mine, together.told
        beside = [besides for _, _, besides, _ in sent]
        common = set[str].intersection(*(set(epochs) for epochs, *_ in sent))
        if common:
            return Agreement(self._use(mine, common), None, beside, value, mine)
        digests = [of_rank for _, of_rank, _, _ in sent]
        agreed = Agreed(_digest_of([about, digests]) if place[1] > 1 else uuid.uuid4().hex)
        if all(parts is not None for *_, parts in sent):
            everywhere = [parts for *_, parts in sent]
        else:
            everywhere = _gather_parts(mine.parts, digests, group, doing) if any(digests) else [[] for _ in sent]
        return Agreement(agreed, everywhere, beside, value, mine)

    def remember(self, agreement: Agreement[Any]) -> None:
        """Let equal parts find this again. Called by every rank, or by none."""
        if agreement.told is not None and self._max_kept:
            others = [one for one in self._remembered if one[1].epoch != agreement.agreed.epoch]
            self._remembered = [*others, (agreement.mine, agreement.agreed)][-self._max_kept :]

    def clear(self) -> None:
        """Forget everything."""
        self._remembered.clear()

    def _find(self, about: str, place: tuple[int, int], parts: Sequence[Any]) -> _Mine | None:
        wanted = (about, place, parts)
        return next((mine for mine, _ in self._remembered if (mine.about, mine.place, mine.parts) == wanted), None)

    def _use(self, mine: _Mine, epochs: set[str]) -> Agreed:
        # An epoch is a digest of all parts, and these are the parts now: there is one that all ranks remember.
        at = next(n for n, (own, agreed) in enumerate(self._remembered) if own is mine and agreed.epoch in epochs)
        self._remembered.append(self._remembered.pop(at))
        return self._remembered[-1][1]


def check_alike(by_rank: Sequence[Mapping[str, Any]], in_full: Callable[[str], Any], group: Group, doing: str) -> None:
    """Raise `OptionError` on all ranks unless all have sent equal options; ``by_rank`` has those of each rank, by rank.

    Called by every rank of the group with the same ``by_rank``; no communication where they are equal. ``in_full``
    returns this rank's value of an option as JSON, for long ones that are sent as digests; the error shows the place.
    """
    if all(each == by_rank[0] for each in by_rank):  # nearly always
        return
    unlike = find_unlike(by_rank)
    if unlike is None:
        return
    name, rank = unlike
    values = gather_from(lambda: in_full(name), group, doing)
    where, first, other = _difference(name, values[0], values[rank])
    raise OptionError(
        f"{doing}: option {where} is {_shown(first)} on rank 0 and {_shown(other)} on rank {rank}, "
        f"expected the same value on all {len(by_rank)} ranks; use the same options on every rank"
    )


def _difference(name: str, first: Any, other: Any) -> tuple[str, Any, Any]:
    """The path at which two values of an option differ, as deep as both are objects, and both values there."""
    if not (isinstance(first, dict) and isinstance(other, dict)):
        return name, first, other
    key = next(key for key in [*first, *other] if first.get(key) != other.get(key))
    return _difference(f"{name}[{key!r}]", first.get(key), other.get(key))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _gather_parts(parts: Sequence[Any], digests: Sequence[Sequence[str]], group: Group, doing: str) -> list[list[Any]]:
    if len(digests) == 1:
        return [list(parts)]
    rank = group_rank(group)
    first: dict[str, tuple[int, int]] = {}
    for sender, of_rank in enumerate(digests):
        for at, digest in enumerate(of_rank):
            first.setdefault(digest, (sender, at))
    mine = list(zip(digests[rank], parts, strict=True))
    gathered = gather_from(
        lambda: [part if first[digest] == (rank, at) else None for at, (digest, part) in enumerate(mine)],
        group,
        doing,
    )
    return [[gathered[first[digest][0]][first[digest][1]] for digest in of_rank] for of_rank in digests]


def _digests_of(parts: Sequence[Any], place: tuple[int, int]) -> list[str]:
    """The digests of the parts; empty texts for a rank that is alone, which has nothing to compare."""
    return [_digest_of(part) for part in parts] if place[1] > 1 else [""] * len(parts)


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()[:32]
