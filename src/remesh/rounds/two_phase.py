"""Up to which collective does each rank go before the cut? Two phases: a barrier before each collective.

The reference that the collective clock is compared with. On the normal path a rank enters a collective in two phases:
first a non-blocking barrier of its members (phase 1), then, when the barrier is through, the collective (phase 2). A
rank may be stopped anywhere but in phase 2. At a checkpoint:

1. All ranks are closed: they take no new request, and from now on only counts let a rank pass from phase 1 to phase 2,
   since two members may see the same barrier end at different times.
2. A collective that *every* member has entered must complete: somebody may be past its barrier. So the target of a
   communicator is the smallest count of its members, and who is at or below it finishes.
3. Nobody is below a target, nobody is inside: aligned. A rank that is still in phase 1 waits for somebody who is not
   there. Its request stays unanswered, its count goes down by one in what is saved, and it asks again after a restart.

Against the clock: the targets are minima instead of maxima, so no rank must run on, and nothing can get stuck; the
price is a barrier for each collective.

Source: Garg, Price and Cooperman, "MANA for MPI", HPDC 2019, section 2.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from remesh.rounds.clock import Verdict
from remesh.rounds.status import Activity, Status, members_by_key


def decide_by_two_phases(statuses: Sequence[Status], targets: Mapping[str, int] | None) -> Verdict:
    """Targets after this wave; `Activity.HELD` is a rank in phase 1, whose count includes the collective it is at."""
    smallest = {
        key: min(statuses[rank].count(key) for rank in members)
        for key, members in members_by_key(statuses).items()
        if members
    }
    new = tuple(sorted(smallest.items()))
    if targets is None:
        return Verdict(new, False, "first wave: targets are the smallest counts")
    if open_ranks := [status.rank for status in statuses if not status.closed]:
        return Verdict(new, False, f"ranks {open_ranks} still take requests")
    finishing = [
        status.rank
        for status in statuses
        if status.activity is Activity.INSIDE
        or (status.activity is Activity.HELD and any(status.count(key) <= smallest[key] for key in status.at))
    ]
    if finishing or smallest != targets:
        return Verdict(new, False, f"ranks {finishing} finish a collective that every member has entered")
    return Verdict(new, True, "every collective that all members entered is complete, none is inside")
