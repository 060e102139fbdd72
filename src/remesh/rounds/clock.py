"""Up to which collective does each rank go before the cut? The collective clock: no barrier on the normal path.

Every rank counts the collectives it has entered on each communicator. At a checkpoint:

1. All ranks stop before their next collective and publish their counts. If all members of each communicator have the
   same and nobody is inside, they are aligned already (4).
2. The *target* of a communicator is the largest count of its members. Who is below it goes on until it is there: the
   others are inside that collective already, or have left it, and cannot come back.
3. A rank that is below one target may need a collective that stands at its target already. That target is raised by
   one, for all its members.
4. Nobody is below a target, nobody is inside: the ranks are *aligned*. Targets cap the counts, so that nobody can leave
   this state; one wave that shows it is enough.

A rank below a target may also wait for a message that a held rank would send after its collective. Raising a target is
safe at any time, since it only lets ranks run on as the program says, so when nothing moves all collectives at which a
rank is held are raised: the program then goes on as it would without us. A program that makes new laggards for ever is
let go after ``MAX_RAISES``, and tried again later.

A communicator may be freed by one member while others still use it, or by all while it has a target. Who freed it says
so for some time, with the count it had then. After that it says nothing, as who has not heard of it yet; but the first
collective of a communicator ends on nobody before all members have entered it, which tells the two apart.

Sources: the sequence numbers are those of MANA 2.0 (Xu and Cooperman, "Enabling practical transparent checkpointing for
MPI: a topological sort approach", CLUSTER 2023); the ring of direct messages there is a central decision here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remesh.rounds.status import Activity, Status, members_by_key

MAX_RAISES = 200
"""Times a round raises targets before it lets the program go. MANA's limit of rounds is the same."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one wave means."""

    targets: tuple[tuple[str, int], ...]
    """By key, sorted: collectives that the members may enter, counted as in `Status.entered`."""
    aligned: bool
    """Whether the cut may be closed."""
    reason: str


def decide_by_clock(statuses: Sequence[Status], targets: Mapping[str, int] | None, *, is_stuck: bool) -> Verdict:
    """Targets after this wave. ``targets`` are those that all statuses were given under; None in the first wave.

    ``is_stuck``: nothing has changed for longer than the caller's patience.
    """
    new = _largest_counts(statuses, targets or {})
    # In the first wave nobody may enter anything: the largest counts are as good as targets that all have been told.
    known = new if targets is None else targets
    lagging = find_lagging(statuses, known)
    unknown = {key for key, target in known.items() if target and key not in members_by_key(statuses)}
    inside = [status.rank for status in statuses if status.activity is Activity.INSIDE]
    if not lagging and not inside and not unknown and new == known:
        return Verdict(_sorted(new), True, "all ranks stand at their targets, none is inside a collective")
    if targets is None:
        return Verdict(_sorted(new), False, "first wave: targets are the largest counts")
    raised = {}
    for status in statuses:
        if status.activity is Activity.HELD and (is_stuck or status.rank in lagging):
            raised.update({key: status.count(key) + 1 for key in status.at if status.count(key) >= new.get(key, 0)})
    new.update(raised)
    if raised:
        why = "nothing moves" if is_stuck else "a rank below another target stands there"
        return Verdict(_sorted(new), False, f"raised the targets of {sorted(raised)}: {why}")
    if lagging:
        rank, key = next(iter(lagging.items()))
        return Verdict(_sorted(new), False, f"ranks {sorted(lagging)} are below a target, rank {rank} on {key}")
    return Verdict(_sorted(new), False, f"ranks {inside} are inside a collective that all have entered")


def find_lagging(statuses: Sequence[Status], targets: Mapping[str, int]) -> dict[int, str]:
    """Ranks that are below a target, each with the first key where it is."""
    members = members_by_key(statuses)
    found: dict[int, str] = {}
    for key, target in targets.items():
        all_have_heard = any(_is_past_the_first(status, key) for status in statuses)
        for rank in members.get(key, ()):
            has_forgotten = all_have_heard and not statuses[rank].knows(key)
            if statuses[rank].count(key) < target and not has_forgotten:
                found.setdefault(rank, key)
    return found


def _is_past_the_first(status: Status, key: str) -> bool:
    """Whether the rank has left the first collective on ``key``."""
    return status.count(key) > (status.activity is Activity.INSIDE and key in status.at)


def _largest_counts(statuses: Sequence[Status], targets: Mapping[str, int]) -> dict[str, int]:
    largest = dict(targets)
    for status in statuses:
        for key, entered in status.entered:
            if entered.count > largest.get(key, -1):
                largest[key] = entered.count
    return largest


def _sorted(targets: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(targets.items()))
