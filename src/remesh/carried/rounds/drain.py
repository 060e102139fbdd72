"""Check that the network is empty, by counting messages sent and received on all ranks.

Messages are counted where the program sends and receives them, so the answer holds on any network. All ranks are asked
in *waves*: a wave is one status of every rank. Ranks answer at different times, so one wave may show a message as
received that was sent after the sender had answered. The network is empty when

1. every rank is closed (it takes nothing new from its program) and quiet (what it had started is complete),
2. for each pair (s, d): sent[s][d] == received[d][s], and
3. what all members of a communicator without a clock have entered is complete on each of them, and
4. the wave before had the same numbers: then nothing was sent or received between the two, and the second was true at
   one moment.

For the third a program is not needed: it is closed, so nothing more is entered, and what all members are inside of ends
by itself. What some member has not entered is complete on none, for that is what such communicators are. It goes on, or
begins anew, after the checkpoint. A member that has freed a communicator reports nothing of it: all on it was complete
there, so all members had entered it. It does not have to remember that: no rank reports a communicator before all
members do, but for messages on their way.

Source: counting after Chandy and Lamport, ACM TOCS 3(1), 1985; two waves after Mattern, "Algorithms for distributed
termination detection", Distributed Computing 2, 1987, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remesh.carried.rounds.status import Status


@dataclass(frozen=True, slots=True)
class MissingMessages:
    """The messages of a pair of ranks that are on their way."""

    source: int
    destination: int
    messages: int
    """Number sent less number received; negative when the receiver answered later than the sender."""


def compute_missing(statuses: Sequence[Status]) -> list[MissingMessages]:
    """Compute what has been sent and not received, by pair of ranks; ``statuses`` in order of rank."""
    balance: dict[tuple[int, int], int] = {}
    for status in statuses:
        for destination, count in status.sent:
            pair = (status.rank, destination)
            balance[pair] = balance.get(pair, 0) + count
        for source, count in status.received:
            pair = (source, status.rank)
            balance[pair] = balance.get(pair, 0) - count
    return [MissingMessages(*pair, count) for pair, count in sorted(balance.items()) if count]


def find_traffic(now: Sequence[Status]) -> str:
    """Find a sign in one wave that the network is not empty; "" when there is none (conditions 1 to 3)."""
    open_ranks = [status.rank for status in now if not status.closed]
    if open_ranks:
        return f"ranks {open_ranks} still take requests"
    loud = [status.rank for status in now if not status.quiet]
    if loud:
        in_file = [status.rank for status in now if status.in_file and not status.quiet]
        of_files = f"; ranks {in_file} are in the middle of an access to a file" if in_file else ""
        return f"ranks {loud} have operations under way{of_files}"
    missing = compute_missing(now)
    if missing:
        first = missing[0]
        return (
            f"{sum(abs(each.messages) for each in missing)} messages are in transit, {first.messages} of them from "
            f"rank {first.source} to rank {first.destination}"
        )
    return find_unended(now)


def find_unended(statuses: Sequence[Status]) -> str:
    """Find a collective that all members have entered and that is not complete on one of them; "" if there is none."""
    entered: dict[str, int] = {}
    for status in statuses:
        for key, each in status.collectives:
            entered[key] = min(each.entered, entered.get(key, each.entered))
    for status in statuses:
        for key, each in status.collectives:
            if each.ended < entered[key]:
                which = f"collective {each.ended + 1} on communicator {key}"
                return f"rank {status.rank} is inside of {which}, which all its members have entered"
    return ""


def is_drained(before: Sequence[Status] | None, now: Sequence[Status]) -> tuple[bool, str]:
    """Whether the network is empty, and why (not)."""
    traffic = find_traffic(now)
    if traffic:
        return False, traffic
    if before is None or _counts(before) != _counts(now):
        return False, "sent equals received; one more wave must confirm it"
    return True, "two waves agree: everything sent has been received"


def _counts(statuses: Sequence[Status]) -> list[tuple[object, ...]]:
    return [(status.sent, status.received, status.closed, status.quiet) for status in statuses]
