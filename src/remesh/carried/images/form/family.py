"""Order in which the processes of a tree are made again, with the right parent, session and process group.

A process gets its session at birth, from its parent, and can only leave it for one of its own. So:

1. a leader of a session is born in the session that its elder children are in, if it has such; any other process in its
   own
2. going down the tree: children of the older session, then the session is made, then the other children
3. an orphan whose session is not that of init is born of a *fleeting* process: a child of the session's leader, or a
   stand-in for a leader that has ended; when that leaves, init becomes the parent
4. groups: leaders first, with a fleeting stand-in for one that has ended; then all others join

The steps are checked against a small model of the kernel in the tests. Source: setsid(2), setpgid(2), credentials(7).
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

INIT: Final = 1
"""Id of the parent of all: of the root of a tree, and of orphans."""
OUTSIDE: Final = 0
"""The session that the kernel shows for init, which was made outside of the namespace."""
_MAX_MEMBERS: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class Kin:
    """A process among its relatives. All ids are inner ones."""

    pid: int
    parent: int  # INIT for the root and for orphans
    group: int
    session: int  # OUTSIDE for that of init
    exit_status: int | None  # as wait returns it, of one that has ended and is not waited for yet; None while it lives
    name: str  # for people

    def __post_init__(self) -> None:
        if self.pid <= INIT or self.parent < INIT or self.group < INIT or self.session < OUTSIDE:
            raise ValueError(
                f"process {self.pid} ({self.name}) has parent {self.parent}, group {self.group} and session "
                f"{self.session}: some of them are outside of the tree"
            )


class FamilyDeed(enum.Enum):
    """The action of a step."""

    FORK = "fork"  # `pid` is made, a child of `other`
    LEAD_SESSION = "lead-session"  # `pid` makes a session
    LEAD_GROUP = "lead-group"  # `pid` makes a group
    JOIN_GROUP = "join-group"  # `pid` enters the group `other`
    LEAVE = "leave"  # `pid`, which is fleeting, ends; its parent `other` takes notice, unless that is init


@dataclass(frozen=True, slots=True)
class FamilyStep:
    """One step of the plan."""

    deed: FamilyDeed
    pid: int
    other: int = 0


def plan_family(kin: Sequence[Kin]) -> list[FamilyStep]:
    """The steps that make all of them, and no other in the end; `ValueError` names one that cannot be made so."""
    plan = _FamilyPlan(kin)
    plan.raise_all()
    plan.group_all()
    return [
        *plan.steps,
        *(FamilyStep(FamilyDeed.LEAVE, pid, parent) for pid, parent in reversed(plan.fleeting.items())),
    ]


class _FamilyPlan:
    def __init__(self, kin: Sequence[Kin]) -> None:
        self.steps: list[FamilyStep] = []
        self.fleeting: dict[int, int] = {}  # with its parent
        self._kin = {each.pid: each for each in kin}
        if len(self._kin) != len(kin) or len(kin) > _MAX_MEMBERS:
            raise ValueError(f"{len(kin)} processes: expected each once, at most {_MAX_MEMBERS}")
        self._children: dict[int, list[int]] = defaultdict(list)
        for each in kin:
            self._children[each.parent].append(each.pid)
        self._birth = self._find_births()
        self._next_free = max((max(each.pid, each.group, each.session) for each in kin), default=INIT) + 1

    def _downwards(self) -> list[int]:
        """The ids of all processes, parents first."""
        order = list(self._children[INIT])
        for pid in order:
            order += self._children.get(pid, ())
        if len(order) != len(self._kin):
            lost = min(set(self._kin) - set(order))
            raise ValueError(f"{self._named(lost)} does not descend from init")
        return order

    def _find_births(self) -> dict[int, int | None]:
        """Find the session in which each must be born; None if any will do."""
        births: dict[int, int | None] = {}
        for pid in reversed(self._downwards()):
            one = self._kin[pid]
            if one.session != pid:
                births[pid] = one.session
                continue
            if one.group != pid:
                raise ValueError(f"{self._named(pid)} leads a session and is in group {one.group}")
            older = {births[child] for child in self._children.get(pid, ())} - {None, pid}
            if len(older) > 1:
                raise ValueError(f"{self._named(pid)} has children of the sessions {sorted(map(str, older))}")
            births[pid] = next(iter(older), None)
        return births

    def _named(self, pid: int) -> str:
        return f"process {pid} ({self._kin[pid].name})"

    # --- births ---

    def raise_all(self) -> None:
        strays = []
        for pid in self._children[INIT]:
            if self._birth[pid] in (None, OUTSIDE):
                self.steps.append(FamilyStep(FamilyDeed.FORK, pid, INIT))
                self._raise_below(pid)
            else:
                strays.append(pid)
        raised = {step.pid for step in self.steps}
        while strays:
            able = [pid for pid in strays if self._birth[pid] in raised or self._birth[pid] not in self._kin]
            if not able:
                raise ValueError(f"{self._named(strays[0])} is in a session that it could not be born in")
            for pid in able:
                self.steps.append(FamilyStep(FamilyDeed.FORK, pid, self._stand_in(self._birth[pid] or OUTSIDE)))
                self._raise_below(pid)
            strays = [pid for pid in strays if pid not in able]
            raised = {step.pid for step in self.steps}

    def _raise_below(self, top: int) -> None:
        waiting = [top]
        for pid in waiting:
            leads, children = self._kin[pid].session == pid, self._children.get(pid, [])
            first = [child for child in children if leads and self._birth[child] not in (None, pid)]
            self.steps += [FamilyStep(FamilyDeed.FORK, child, pid) for child in first]
            if leads:
                self.steps.append(FamilyStep(FamilyDeed.LEAD_SESSION, pid))
            for child in children:
                if self._birth[child] not in (None, self._kin[pid].session) and child not in first:
                    raise ValueError(
                        f"{self._named(child)} is in session {self._birth[child]}, which its parent "
                        f"{self._named(pid)} never was in"
                    )
            self.steps += [FamilyStep(FamilyDeed.FORK, child, pid) for child in children if child not in first]
            waiting += children

    def _stand_in(self, session: int) -> int:
        """Plan a fleeting process of a session, whose child becomes one of init's when it leaves."""
        if session in self.fleeting:
            return session
        if session in self._kin:
            return self._add_fleeting(self._take_free(), session)
        self._add_fleeting(session, INIT)
        self.steps.append(FamilyStep(FamilyDeed.LEAD_SESSION, session))
        return session

    def _take_free(self) -> int:
        self._next_free += 1
        return self._next_free - 1

    def _add_fleeting(self, pid: int, parent: int) -> int:
        self.fleeting[pid] = parent
        self.steps.append(FamilyStep(FamilyDeed.FORK, pid, parent))
        return pid

    # --- groups ---

    def group_all(self) -> None:
        members: dict[int, list[Kin]] = defaultdict(list)
        for each in self._kin.values():
            members[each.group].append(each)
        joins = []
        for group, those in members.items():
            leader = self._kin.get(group)
            if len({each.session for each in [*those, leader] if each}) > 1:
                raise ValueError(f"the process group {group} is of several sessions")
            if leader is None and group not in self.fleeting:
                self._add_fleeting(group, those[0].pid)
            if group != those[0].session:
                self.steps.append(FamilyStep(FamilyDeed.LEAD_GROUP, group))
            joins += [(each.pid in members, each.pid, group) for each in those if each.pid != group]
        # A process that made a group and went to another goes when that has its members.
        self.steps += [FamilyStep(FamilyDeed.JOIN_GROUP, pid, group) for _, pid, group in sorted(joins)]
