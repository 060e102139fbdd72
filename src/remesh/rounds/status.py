"""What does a rank say of itself while a checkpoint is being agreed on?

Definitions. A *collective key* names a communicator (or any set of ranks that call collectives together); it is the
same text on all its members. ``entered[key]`` counts the collectives that a rank has entered on it, from the start of
the program on, non-blocking ones when they are initiated. ``sent[d]`` and ``received[s]`` count messages of the wire to
and from world rank d and s, over all communicators.

The values are frozen and hashable, so that a state machine that is made of them can be explored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from remesh.errors import FormatError


class Activity(Enum):
    """What a rank is doing."""

    COMPUTING = "computing"
    """In the program's own code; what it asks for next is not known."""
    WAITING = "waiting"
    """In a blocking call of point to point that cannot end yet."""
    HELD = "held"
    """At a collective that it may not enter; its request is unanswered and changes nothing if it is asked again."""
    INSIDE = "inside"
    """In a collective that it has entered, or with non-blocking ones under way."""
    FINISHED = "finished"
    """Its program has ended; it asks for nothing any more."""


@dataclass(frozen=True, slots=True)
class Entered:
    """How far a rank is on one communicator."""

    count: int
    """Collectives entered, at least 0."""
    members: tuple[int, ...]
    """World ranks that take part, both sides of an intercommunicator, sorted; empty if the rank has freed it. It says
    that for as long as another member may be behind it, and may then forget."""


@dataclass(frozen=True, slots=True)
class Status:
    """One rank's answer in one wave."""

    rank: int
    activity: Activity
    at: tuple[str, ...] = ()
    """Keys of the collectives that the rank is held at or is inside of, sorted; more than one with several threads."""
    entered: tuple[tuple[str, Entered], ...] = ()
    """By key, sorted, each key once."""
    sent: tuple[tuple[int, int], ...] = ()
    """(destination, messages), sorted, without zeros."""
    received: tuple[tuple[int, int], ...] = ()
    """(source, messages), sorted, without zeros."""
    quiet: bool = True
    """Nothing that this rank has started is under way: sends are complete, so are non-blocking collectives."""
    closed: bool = False
    """The rank takes no new request of its program."""
    in_file: bool = field(default=False, compare=False)
    """Its program is in the middle of an access to a file that ranks share: a reason for not being quiet."""
    refusals: tuple[str, ...] = field(default=(), compare=False)
    """Why its program cannot be imaged now; empty when it can."""

    def count(self, key: str) -> int:
        """Collectives entered on ``key``; 0 if the rank has not heard of it yet."""
        return next((entered.count for name, entered in self.entered if name == key), 0)

    def knows(self, key: str) -> bool:
        """Whether the rank has heard of ``key`` and not forgotten it."""
        return any(name == key for name, _ in self.entered)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `from_json` makes an equal one."""
        return {
            "rank": self.rank,
            "activity": self.activity.value,
            "at": list(self.at),
            "entered": [[key, each.count, list(each.members)] for key, each in self.entered],
            "sent": [list(pair) for pair in self.sent],
            "received": [list(pair) for pair in self.received],
            "quiet": self.quiet,
            "closed": self.closed,
            "in_file": self.in_file,
            "refusals": list(self.refusals),
        }

    @classmethod
    def from_json(cls, value: Any) -> Status:
        """The status that these JSON values describe; `FormatError` for what is none."""
        try:
            return cls(
                rank=int(value["rank"]),
                activity=Activity(value["activity"]),
                at=tuple(map(str, value["at"])),
                entered=tuple((str(key), Entered(int(n), tuple(map(int, who)))) for key, n, who in value["entered"]),
                sent=tuple((int(who), int(n)) for who, n in value["sent"]),
                received=tuple((int(who), int(n)) for who, n in value["received"]),
                quiet=bool(value["quiet"]),
                closed=bool(value["closed"]),
                in_file=bool(value["in_file"]),
                refusals=tuple(map(str, value["refusals"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError("bad-status", f"reading the status of a rank: {error!r}; the peer is not ours") from error


def pairs(counts: Mapping[int, int] | Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Counts by world rank in the form of `Status`.

    >>> pairs([0, 3, 0, 1])
    ((1, 3), (3, 1))
    """
    items: Iterable[tuple[int, int]] = counts.items() if isinstance(counts, Mapping) else enumerate(counts)
    return tuple(sorted((rank, count) for rank, count in items if count))


def members_by_key(statuses: Iterable[Status]) -> dict[str, tuple[int, ...]]:
    """Who takes part in what, from all who know: a member may not have heard of a communicator yet, or freed it."""
    found: dict[str, tuple[int, ...]] = {}
    for status in statuses:
        for key, entered in status.entered:
            if len(entered.members) >= len(found.get(key, ())):
                found[key] = entered.members
    return found
