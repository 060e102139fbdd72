"""Collective clock: which collectives have to end before the cut (those that have ended on some rank).

A collective that is complete on no member has changed nothing in any program. Its requests are unanswered, so it is
left as it is: it goes on after the checkpoint, and begins anew after a restart. No rank waits for a member that has not
entered it. One that is complete on some member has to be complete on all. At a checkpoint:

1. All ranks stop entering collectives, and publish for each group the number of the last one that is complete there, up
   to which number all are, and how many they have entered. Programs go on. What all members have entered ends by
   itself, and counts as complete. What could end on one member before another has entered it is reported as complete by
   that one.
2. The *target* of a group is the largest number that is complete on any member. Ranks that have not reached it may
   enter collectives up to there: the others are inside of them, or through.
3. A rank below one target may be inside of a collective that is beyond the target of another group. That target is
   raised by one, for all its members.
4. When no rank is below a target that all had received, the ranks are *aligned*. Targets cap what is entered, so no
   rank can leave this state; one wave that shows it is enough. What is left open is so on all members, or not entered
   yet.

A rank below a target may also wait for a message that another one would send after its collective. Raising a target is
safe at any time, since it only lets ranks run on as the program would. So when nothing moves, and a rank below a target
is not inside of a collective that ends by itself, all targets are raised beyond which some rank is inside of one: the
program then goes on as it would without us. A program that makes new laggards for ever is released after
``MAX_RAISES``, and tried again later.

A group that is being made has its first collective, which all members enter. A rank that has left a group goes on
reporting how far it was there, and names no members; it is below a target there only while it is inside of something.

Sources: the sequence numbers are those of MANA 2.0 (Xu and Cooperman, "Enabling practical transparent checkpointing for
MPI: a topological sort approach", CLUSTER 2023), where entering a collective sets the target; the ring of direct
messages there is a central decision here.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from remesh.carried.rounds.status import Activity, Status, members_by_key

MAX_RAISES = 200
"""Limit of the times that a round raises targets before it lets the program go. MANA's limit of rounds is the same."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The conclusion from one wave."""

    targets: tuple[tuple[str, int], ...]
    """The targets by key, sorted: the number up to which the members may enter collectives."""
    aligned: bool
    """Whether the cut may be closed."""
    reason: str


def decide_by_clock(statuses: Sequence[Status], targets: Mapping[str, int] | None, *, is_stuck: bool) -> Verdict:
    """Decide the targets after a wave. ``targets`` are those that all statuses answered to; None in the first wave.

    ``is_stuck``: nothing has changed for longer than the caller's patience.
    """
    new = _last_completed(statuses, targets or {})
    if targets is None:
        # A rank that answered early may have entered since what another one then completed.
        return Verdict(_sorted(new), False, "first wave: targets are what is complete anywhere")
    lagging = find_lagging(statuses, targets)
    if not lagging and new == targets:
        return Verdict(_sorted(new), True, "what is complete anywhere is complete on all ranks that take part")
    waiting = {status.rank for status in statuses if status.activity is Activity.HELD and status.rank in lagging}
    # A rank inside of what it may complete needs time, and no other program.
    needs_others = any(statuses[rank].activity is not Activity.INSIDE for rank in lagging)
    leaving = range(len(statuses)) if is_stuck and needs_others else waiting
    if raised := _raise_targets(statuses, new, leaving):
        why = "nothing moves" if is_stuck else "a rank below another target, or no other rank, waits for them"
        return Verdict(_sorted(new | raised), False, f"raised the targets of {sorted(raised)}: {why}")
    if not lagging:
        return Verdict(_sorted(new), False, "a rank is beyond the targets that it was sent")
    rank, key = next(iter(lagging.items()))
    return Verdict(_sorted(new), False, f"ranks {sorted(lagging)} are below a target, rank {rank} on {key}")


def split_targets(targets: Mapping[str, int], statuses: Sequence[Status]) -> list[dict[str, int]]:
    """Split the targets by rank: each rank gets only those of its own groups, since all of them would be quadratic.

    A group that all members have left concerns no rank. ``statuses`` are those that the targets follow from.
    """
    found: list[dict[str, int]] = [{} for _ in statuses]
    members = members_by_key(statuses)
    for key, number in targets.items():
        for rank in members.get(key, ()):
            found[rank][key] = number
    return found


def find_lagging(statuses: Sequence[Status], targets: Mapping[str, int]) -> dict[int, str]:
    """Find the ranks that are below a target that they were sent, each with the first key where it is."""
    found: dict[int, str] = {}
    for status in statuses:
        for key, standing in status.standings:
            target = targets.get(key, 0)
            # Who has left a group enters nothing more there: what only others have entered, as a barrier that has
            # ended by its timeout, would be waited for without an end.
            if standing.reached < (target if standing.members else min(target, standing.entered)):
                found.setdefault(status.rank, key)
    return found


def _raise_targets(statuses: Sequence[Status], targets: Mapping[str, int], leaving: Container[int]) -> dict[str, int]:
    """Raise the targets of collectives that some rank stands beyond, and has to leave."""
    raised = {}
    for status in (each for each in statuses if each.rank in leaving):
        for key in status.at:
            standing = status.standing(key)
            if standing is not None and standing.reached >= targets.get(key, 0):
                raised[key] = standing.reached + 1
    return raised


def _last_completed(statuses: Sequence[Status], targets: Mapping[str, int]) -> dict[str, int]:
    last = dict(targets)
    entered: dict[str, list[int]] = {}
    for status in statuses:
        for key, standing in status.standings:
            if standing.completed > last.get(key, 0):
                last[key] = standing.completed
            if standing.entered:
                entered.setdefault(key, []).append(standing.entered)
    members = members_by_key(statuses) if entered else {}
    for key, numbers in entered.items():
        if len(numbers) == len(members.get(key, ())) and min(numbers) > last.get(key, 0):
            last[key] = min(numbers)
    return last


def _sorted(targets: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(targets.items()))
