"""Status of a rank while a checkpoint is being agreed on.

Definitions. A *collective key* names a communicator (or any set of ranks that call collectives together); it is the
same text on all its members. Each rank numbers the collectives that it enters on a key from 1 on, from the start of the
program; members enter them in one order, so a number means the same to all. A collective is *complete* on a rank when
its outcome belongs to the program there, delivered or not. ``sent[d]`` and ``received[s]`` count messages of the wire
to and from world rank d and s, over all communicators.

The values are frozen and hashable, so that a state machine that is made of them can be explored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from remesh.carried.rounds.members import pack_members, unpack_members
from remesh.foundation.errors import FormatError


class Activity(Enum):
    """The activity of a rank."""

    COMPUTING = "computing"
    """The rank is in the program's own code; what it asks for next is not known."""
    WAITING = "waiting"
    """The rank is in a blocking call of point to point that cannot end yet."""
    HELD = "held"
    """The rank waits, inside of a collective that it may not complete; its request is unanswered, and the collective
    changes nothing if it is begun anew."""
    INSIDE = "inside"
    """The rank is in a collective that it may complete, blocking or not."""
    FINISHED = "finished"
    """The program of the rank has ended; it asks for nothing any more."""


@dataclass(frozen=True, slots=True)
class ClockProgress:
    """The progress of a rank on one communicator."""

    completed: int
    """Number of the last collective that is complete here; 0 if none is."""
    reached: int
    """All collectives up to this number are complete here. Non-blocking ones may end out of order, so `completed` may
    be larger."""
    members: tuple[int, ...]
    """World ranks that take part, sorted; empty if the rank has left it."""
    entered: int = 0
    """Number of the last collective that it is inside of, or through."""


@dataclass(frozen=True, slots=True)
class CollectiveProgress:
    """The progress of a rank on a communicator without a clock: nothing is complete on a member that not all have
    entered. A rank that does not report it has freed it, and everything on it is complete there.
    """

    entered: int
    """Number of collectives entered; none is while the rank is closed."""
    ended: int
    """Number up to which all are complete here."""


@dataclass(frozen=True, slots=True)
class Status:
    """The answer of one rank in one wave."""

    rank: int
    activity: Activity
    at: tuple[str, ...] = ()
    """Keys of the collectives that the rank is inside of and may not complete, sorted, each key once."""
    standings: tuple[tuple[str, ClockProgress], ...] = ()
    """The progress on each clock, as pairs of key and progress, sorted, each key once."""
    sent: tuple[tuple[int, int], ...] = ()
    """Messages sent: (destination, messages), sorted, without zeros."""
    received: tuple[tuple[int, int], ...] = ()
    """Messages received: (source, messages), sorted, without zeros."""
    quiet: bool = True
    """Nothing that this rank has started is under way: sends are complete, so is every collective that it knows to have
    to be."""
    closed: bool = False
    """The rank takes no new request of its program."""
    in_file: bool = field(default=False, compare=False)
    """Its program is in the middle of an access to a file that ranks share: a reason for not being quiet."""
    collectives: tuple[tuple[str, CollectiveProgress], ...] = ()
    """The collectives by key, sorted, each key once: of communicators that have no clock."""
    refusals: tuple[str, ...] = field(default=(), compare=False)
    """Reasons why its program cannot be imaged now; empty when it can."""

    def standing(self, key: str) -> ClockProgress | None:
        """The rank's progress on ``key``; None if it does not know it yet."""
        return next((standing for name, standing in self.standings if name == key), None)

    def to_json(self) -> dict[str, Any]:
        """The status as JSON values; `from_json` makes an equal one."""
        return {
            "rank": self.rank,
            "activity": self.activity.value,
            "at": list(self.at),
            "standings": [
                [key, at.completed, at.reached, pack_members(at.members), at.entered] for key, at in self.standings
            ],
            "sent": [list(pair) for pair in self.sent],
            "received": [list(pair) for pair in self.received],
            "quiet": self.quiet,
            "closed": self.closed,
            "in_file": self.in_file,
            "collectives": [[key, each.entered, each.ended] for key, each in self.collectives],
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
                standings=tuple(
                    (str(key), ClockProgress(int(completed), int(reached), unpack_members(who), *map(int, entered)))
                    for key, completed, reached, who, *entered in value["standings"]
                ),
                sent=tuple((int(who), int(n)) for who, n in value["sent"]),
                received=tuple((int(who), int(n)) for who, n in value["received"]),
                quiet=bool(value["quiet"]),
                closed=bool(value["closed"]),
                in_file=bool(value["in_file"]),
                collectives=tuple(
                    (str(key), CollectiveProgress(int(entered), int(ended)))
                    for key, entered, ended in value["collectives"]
                ),
                refusals=tuple(map(str, value["refusals"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                "bad-status", f"reading the status of a rank: {error!r}; the sender is not a process of this job"
            ) from error


def pairs(counts: Mapping[int, int] | Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Counts by world rank in the form of `Status`.

    >>> pairs([0, 3, 0, 1])
    ((1, 3), (3, 1))
    """
    items: Iterable[tuple[int, int]] = counts.items() if isinstance(counts, Mapping) else enumerate(counts)
    return tuple(sorted((rank, count) for rank, count in items if count))


def members_by_key(statuses: Iterable[Status]) -> dict[str, tuple[int, ...]]:
    """The members of each communicator, from all ranks that know it: some may not know it yet, or have freed it."""
    found: dict[str, tuple[int, ...]] = {}
    for status in statuses:
        for key, standing in status.standings:
            if len(standing.members) >= len(found.get(key, ())):
                found[key] = standing.members
    return found
