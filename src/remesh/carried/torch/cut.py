"""Process groups of a program at a cut: their progress reported, shed, and grown again elsewhere."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final

from remesh.carried.rounds.status import Activity, ClockProgress, Status, pairs
from remesh.carried.torch.gate import Entrant
from remesh.carried.torch.groups import Groups
from remesh.carried.torch.program_store import CarriedStore, StoreLink
from remesh.carried.torch.reunion import Reunion
from remesh.carried.torch.works import see_under_way
from remesh.foundation.errors import PeerError
from remesh.foundation.settings import timeout_s
from remesh.groups.aborts import Aborts
from remesh.groups.gloo_sockets import Surroundings, cut_connections, gloo_loops, open_sockets, pick_gloos

_NOTHING: Final = Surroundings(frozenset(), frozenset())
_COLLECT_GRACE_S: Final = 0.2
"""How long gloo's threads are waited for before unreachable objects are collected: most groups are in no cycle."""
_GONE_TIMEOUT_S: Final = timeout_s(10.0)
_ABORT_TIMEOUT: Final = timedelta(seconds=30)
_POLL_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class _HowFar:
    """How far this process is on one key."""

    entered: int
    completed: int
    """Number of the last collective that has ended, or has to end."""
    reached: int
    """All collectives up to this number have ended."""
    has_to_end: bool
    """Whether a collective is under way that has to end before a cut, and may."""
    is_open: bool
    """Whether a collective is under way that may not end before a cut, and can begin anew."""
    is_waiting: bool
    """Whether a thread waits for a collective of the kind that `is_open` is about."""

    def standing(self, members: Sequence[int]) -> ClockProgress:
        return ClockProgress(self.completed, self.reached, tuple(sorted(members)), self.entered)


def _how_far(entered: int, target: int, under_way: Sequence[Entrant]) -> _HowFar:
    """``under_way`` are the collectives that have not ended, of those entered."""
    loose = {each.number: each for each in under_way if each.can_begin_anew and not each.is_inside}
    bound = [each for each in under_way if each.number not in loose or each.number <= target]
    for each in bound:
        if not each.is_inside:
            each.wait_aside()
    completed = entered
    while completed in loose:
        completed -= 1
    beyond = [each for number, each in loose.items() if number > target]
    return _HowFar(
        entered,
        completed,
        min((each.number for each in under_way), default=entered + 1) - 1,
        has_to_end=bool(bound),
        is_open=bool(beyond),
        is_waiting=any(each.is_waited_for for each in beyond),
    )


def _count_messages(groups: Groups) -> tuple[dict[int, int], dict[int, int]]:
    """Count the messages sent and received, by world rank."""
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for group in groups.all:
        group.count_messages(sent, received)
    return sent, received


class GroupsAtCut:
    """The groups of this process, for the control thread."""

    def __init__(self, groups: Groups, link: StoreLink, rank: int, size: int) -> None:
        self._groups, self._link = groups, link
        self._rank, self._size = rank, size

    def describe(self, *, has_ended: bool = False) -> Status:
        """Where the process stands, in the words of the protocol."""
        groups, gate = self._groups, self._groups.gate
        with gate.changed:
            counts = {key: tally.entered for key, tally in gate.tallies.items()}
            under_way = {key: see_under_way(gate, tally) for key, tally in gate.tallies.items()}
            held, is_closed, num_passing = gate.held_keys(), gate.is_closed, gate.num_passing
            targets = {key: gate.target_of(key) for key in counts}
        for group in groups.live:
            group.wait_for_messages()
        gone = {group.place.key for group in groups.all if not group.is_live}
        ways = {}
        for key in sorted(counts):
            works = [each for each in under_way[key] if each.is_inside or not (key in gone or each.settle())]
            ways[key] = _how_far(counts[key], targets[key], works)
        left = {group.place.key: () for group in groups.all if not group.is_live}
        members = {**groups.members, **left}
        sent, received = _count_messages(groups)
        is_inside = any(way.has_to_end for way in ways.values()) or any(group.has_to_end for group in groups.live)
        is_held = bool(held) or any(way.is_waiting for way in ways.values())
        activity = Activity.INSIDE if is_inside else Activity.HELD if is_held else Activity.COMPUTING
        return Status(
            self._rank,
            Activity.FINISHED if has_ended else activity,
            tuple(sorted({*held, *(key for key, way in ways.items() if way.is_open)})),
            tuple((key, way.standing(members.get(key, ()))) for key, way in ways.items()),
            pairs(sent),
            pairs(received),
            quiet=not is_inside and not num_passing,
            closed=is_closed or has_ended,
        )

    def shed(self) -> str:
        """Let go of all connections; returns why that could not be done, "" if it was done. The gate is closed."""
        live, destroyed = self._groups.live, [group for group in self._groups.all if not group.is_live]
        if any(group.has_open_ends for group in self._groups.all):
            # gloo has no other way to end a wait.
            cut_connections(pick_gloos(open_sockets(), _NOTHING))
        try:
            Aborts([abort for group in live if (abort := group.find_abort()) is not None]).wait(_ABORT_TIMEOUT)
        except PeerError as error:
            return str(error)
        have_all = [group.shed(_GONE_TIMEOUT_S) for group in live]
        have_all += [group.forget(_GONE_TIMEOUT_S) for group in destroyed]
        self._link.drop()
        if not all(have_all):
            return f"something is still waited for {_GONE_TIMEOUT_S:g} s after the connections of its group were cut"
        return _wait_until_gone()

    def grow(self, prefix: str, address: tuple[str, int], ended: Sequence[int]) -> None:
        """Make the groups again, with keys of this prefix in the store at this address. All ranks do this.

        ``ended`` are the ranks whose programs are over. Groups that a member has left are not made again.
        """
        self._link.move(address)
        reunion = Reunion(CarriedStore(self._link, prefix, of_control=True), self._rank)
        live = self._groups.live
        places = [group.place for group in live]
        reunion.arrive({group.place.key: group.received_counts() for group in live}, self._size - len(ended))
        for group, is_whole in zip(live, reunion.find_whole(places), strict=True):
            if is_whole:
                group.build(reunion.store_of(group.place))
            else:
                gone = reunion.find_gone(group.place, ended)
                group.break_off(f"ranks {gone} had left it before the last cut")
        for group in live:
            if group.is_live:
                group.begin_anew()
                group.post_again(partial(reunion.received_by, group.place))


def _wait_until_gone() -> str:
    """Wait until gloo's loops have ended, and their descriptors are closed."""
    began_s, has_collected = time.monotonic(), False
    while gloo_loops():
        waited_s = time.monotonic() - began_s
        if waited_s > _COLLECT_GRACE_S and not has_collected:
            gc.collect()
            has_collected = True
        if waited_s > _GONE_TIMEOUT_S:
            return f"groups are still there {_GONE_TIMEOUT_S:g} s after they were destroyed: something refers to them"
        time.sleep(_POLL_S)
    return ""
